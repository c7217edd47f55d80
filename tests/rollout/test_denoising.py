"""The sampler of masked-diffusion models against a short reference, and its model against
transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_models import MASK, VOCAB, FrozenPrefix, Sender, denoised, masked_dream, weights
from torch.testing import assert_close

from ctrl_megatron.rollout.decoding import CancelToken, DecodingRow, PauseControl, decode_all
from ctrl_megatron.rollout.denoising import (
    DenoisingBatch,
    DenoisingFunctions,
    DenoisingOptions,
    commits_per_step,
)
from ctrl_megatron.rollout.engine import EngineSpec
from ctrl_megatron.rollout.hf_diffusion import DiffusionEngine, load_denoiser
from ctrl_megatron.types import Completion, SamplingParams

V, CPU = VOCAB, torch.device("cpu")
TABLE = 2 * torch.randn(97, V, generator=torch.Generator().manual_seed(0))
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]


def toy(text: list[int], place: int) -> torch.Tensor:
    """(V,) logits for ``place`` of a text, which depend on all of its tokens."""
    total = sum((at + 1) * (token + 3) for at, token in enumerate(text))
    return TABLE[(total + 13 * place) % 97]


def toy_logits(tokens: torch.Tensor, attended: torch.Tensor, places: int) -> torch.Tensor:
    texts = [row[seen].tolist() for row, seen in zip(tokens, attended, strict=True)]
    return torch.stack(
        [torch.stack([toy(t, len(t) - places + p) for p in range(places)]) for t in texts]
    )


def toy_keep(*given: Any) -> Any:
    raise AssertionError("no prefix is kept unless an option says so")


TOY = DenoisingFunctions(toy_logits, toy_keep, MASK, CPU)


def sample(
    prompts: list[list[int]],
    options: DenoisingOptions,
    seed: int = 0,
    model: DenoisingFunctions = TOY,
    version: Callable[[], str] = lambda: "v",
    **params: Any,
) -> list[Completion]:
    streams = [torch.Generator().manual_seed(seed + 100 * row) for row in range(len(prompts))]
    rows = [DecodingRow(p, stream) for p, stream in zip(prompts, streams, strict=True)]
    control = PauseControl()
    decode_all(
        lambda *given: DenoisingBatch(model, options, *given),
        rows,
        SamplingParams(**params),
        max_rows=8,
        control=control,
        token=control.begin_work(),
        version=version,
    )
    return [row.completion() for row in rows]


@pytest.mark.parametrize("alg", ["entropy", "margin", "random"])
@pytest.mark.parametrize(
    ("steps", "alg_temp", "block"),
    [(12, 0.0, None), (5, 0.0, None), (12, 0.3, None), (30, 0.0, None), (9, 0.3, 5)],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_order_and_log_probs_are_those_of_the_reference(
    alg: Any, steps: int, alg_temp: float, block: int | None, temperature: float
) -> None:
    options = DenoisingOptions(steps=steps, alg=alg, alg_temp=alg_temp, block_length=block)
    drawn = sample(PROMPTS, options, max_tokens=12, temperature=temperature)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, drawn, strict=True)):
        tokens, order, log_probs = denoised(
            toy,
            prompt,
            12,
            alg=alg,
            seed=100 * row,
            t=temperature,
            steps=steps,
            alg_temp=alg_temp,
            block=block,
        )
        assert (list(completion.token_ids), list(completion.order)) == (tokens, order)
        assert completion.log_probs == pytest.approx(log_probs, abs=1e-5)
        assert completion.finish_reason == "length" and MASK not in tokens


@pytest.mark.parametrize("alg", ["entropy", "margin", "random"])
@pytest.mark.parametrize("block", [None, 4])
def test_a_row_is_the_same_in_every_batch(alg: Any, block: int | None) -> None:
    options = DenoisingOptions(alg=alg, block_length=block, alg_temp=0.2)
    together = sample(PROMPTS, options, max_tokens=10, top_p=0.9)
    alone = [
        sample([prompt], options, seed=100 * row, max_tokens=10, top_p=0.9)[0]
        for row, prompt in enumerate(PROMPTS)
    ]
    assert together == alone
    assert sample(PROMPTS, options, seed=1, max_tokens=10, top_p=0.9) != together


def test_the_schedule_of_as_many_steps_as_tokens() -> None:
    """The first step commits nothing and the last one two tokens, as upstream."""
    assert commits_per_step(256, 256) == [0, *[1] * 254, 2]
    for tokens in (1, 7, 64):
        for steps in (1, 3, 64, 100):
            counts = commits_per_step(tokens, steps)
            assert len(counts) == steps and sum(counts) == tokens and min(counts) >= 0
    assert commits_per_step(64, 1) == [64]


def test_blocks_are_denoised_one_after_the_other() -> None:
    options = DenoisingOptions(steps=9, block_length=4, alg="random")
    (completion,) = sample([[1]], options, max_tokens=10)
    blocks = [completion.order[i : i + 4] for i in range(0, 10, 4)]
    for number, own in enumerate(blocks):
        assert all(3 * number <= step < 3 * number + 3 for step in own)
    assert len(set(completion.order)) > 3


def test_chance_orders_places_evenly_and_a_temperature_by_its_formula() -> None:
    draws = 150
    options = DenoisingOptions(steps=2, alg="random")
    (prompt,), length = [[1, 2]], 4

    def first(options: DenoisingOptions) -> torch.Tensor:
        """How often each place was committed in the step that commits one."""
        counts = torch.zeros(length)
        for seed in range(draws):
            (one,) = sample([prompt], options, seed=seed, max_tokens=length, temperature=0.0)
            counts += torch.tensor([step == min(one.order) for step in one.order]).float()
        return counts / draws

    # The first of two steps commits one of four places: 4 * 0.4995, rounded down.
    even = first(options)
    assert bool(((even - 0.25).abs() < 5 * (0.25 * 0.75 / draws) ** 0.5).all())
    text, sure = [*prompt, *[MASK] * length], []
    for place in range(length):
        p = toy(text, len(prompt) + place).softmax(-1) * (torch.arange(V) != MASK)
        p = p / p.sum()
        sure.append((p * (p + 1e-10).log()).sum())
    one = first(DenoisingOptions(steps=2, alg="entropy", alg_temp=0.5))
    wanted = (torch.stack(sure) / 0.5).softmax(-1)
    assert bool(((one - wanted).abs() < 5 * (wanted * (1 - wanted) / draws).sqrt() + 1e-9).all())


def test_a_row_ends_with_the_stop_token_that_nothing_unknown_precedes() -> None:
    options = DenoisingOptions(alg="entropy")
    whole = sample(PROMPTS, options, max_tokens=12)
    for free, prompt in zip(whole, PROMPTS, strict=True):
        stop = free.token_ids[6]
        row = PROMPTS.index(prompt)
        (ended,) = sample([prompt], options, seed=100 * row, max_tokens=12, stop_token_ids=(stop,))
        length = free.token_ids.index(stop) + 1
        assert ended.finish_reason == "stop"
        assert ended.token_ids == free.token_ids[:length]
        assert (ended.order, ended.log_probs) == (free.order[:length], free.log_probs[:length])


def test_truncation_leaves_the_likeliest_tokens_and_log_probs_as_they_are() -> None:
    options = DenoisingOptions(alg="margin")
    for seed in range(20):
        (one,) = sample([[1]], options, seed=seed, max_tokens=3, top_k=2)
        order = sorted(range(3), key=lambda p: one.order[p])
        text = [1, *[MASK] * 3]
        for step in sorted(set(one.order)):
            places = [p for p in order if one.order[p] == step]
            for place in places:
                logits = toy(text, 1 + place)
                possible = logits.masked_fill(torch.arange(V) == MASK, -torch.inf)
                assert one.token_ids[place] in possible.topk(2).indices.tolist()
                expected = float(logits.log_softmax(-1)[one.token_ids[place]])
                assert one.log_probs[place] == pytest.approx(expected, abs=1e-5)
            for place in places:
                text[1 + place] = one.token_ids[place]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"steps": 0}, "steps .* got 0"),
        ({"steps": 2.5}, "steps .* got 2.5"),
        ({"block_length": -1}, "block_length"),
        ({"alg": "maskgit"}, "alg must be one of entropy, margin, random"),
        ({"alg_temp": -0.1}, "alg_temp"),
        ({"keep_prefix": 1}, "keep_prefix must be true or false, got 1"),
        ({"diffusion_steps": 4}, "knows no diffusion_steps; known: steps, alg"),
    ],
)
def test_options_that_mean_nothing_are_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DenoisingOptions.from_extra(given)


@pytest.mark.parametrize(
    ("family", "steps", "block"), [("Dream", 9, 4), ("llada", 9, 4), ("llada", 12, None)]
)
def test_a_kept_prefix_is_that_of_the_blocks_first_pass(
    tmp_path: Path, family: str, steps: int, block: int | None
) -> None:
    """Rows of unequal prompts together against one row whose keys and values are replaced."""
    theirs, _ = masked_dream(3, tmp_path, family)
    model = denoiser(tmp_path)
    options = DenoisingOptions(steps=steps, block_length=block, keep_prefix=True)
    drawn = sample(PROMPTS, options, model=model, max_tokens=12, temperature=0.8)
    frozen, other = FrozenPrefix(theirs, shifted=family == "Dream"), 0
    for row, (prompt, completion) in enumerate(zip(PROMPTS, drawn, strict=True)):
        tokens, order, log_probs = denoised(
            frozen,
            prompt,
            12,
            alg="entropy",
            seed=100 * row,
            t=0.8,
            steps=steps,
            block=block,
            begin=frozen.begin,
        )
        assert (list(completion.token_ids), list(completion.order)) == (tokens, order)
        assert completion.log_probs == pytest.approx(log_probs, abs=1e-4)
    exact = replace(options, keep_prefix=False)
    for one, two in zip(
        drawn, sample(PROMPTS, exact, model=model, max_tokens=12, temperature=0.8), strict=True
    ):
        other += one.log_probs != pytest.approx(two.log_probs, abs=1e-3)
    assert other, "the approximation should show somewhere"


def test_rows_with_kept_prefixes_are_the_same_in_every_batch(tmp_path: Path) -> None:
    """Also where a row ends before the others, in the middle of a block."""
    masked_dream(3, tmp_path)
    options = DenoisingOptions(block_length=5, keep_prefix=True)
    given: dict[str, Any] = {"model": denoiser(tmp_path), "max_tokens": 10, "top_p": 0.9}
    whole = sample(PROMPTS, options, **given)
    for stop in (None, whole[2].token_ids[1], whole[0].token_ids[6]):
        given["stop_token_ids"] = () if stop is None else (stop,)
        together = sample(PROMPTS, options, **given)
        assert len({len(row.token_ids) for row in together}) > (stop is not None)
        for row, prompt in enumerate(PROMPTS):
            (alone,) = sample([prompt], options, seed=100 * row, **given)
            assert (alone.token_ids, alone.order) == (together[row].token_ids, together[row].order)
            assert alone.log_probs == pytest.approx(together[row].log_probs, abs=1e-5)


def test_a_prefix_is_computed_once_a_block_and_anew_for_other_weights(tmp_path: Path) -> None:
    masked_dream(3, tmp_path)
    model, kept = denoiser(tmp_path), list[int]()

    def keep(tokens: torch.Tensor, attended: torch.Tensor, places: int) -> Any:
        kept.append(places)
        return model.keep(tokens, attended, places)

    options = DenoisingOptions(block_length=4, keep_prefix=True, steps=12)
    given: dict[str, Any] = {"model": replace(model, keep=keep), "max_tokens": 12}
    sample(PROMPTS, options, **given)
    assert kept == [12, 8, 4]
    kept.clear()
    steps = count()
    (one, *_) = sample(PROMPTS, options, version=lambda: f"v{next(steps) >= 6}", **given)
    assert kept == [12, 8, 8, 4] and len(one.spans) > 1


@pytest.mark.parametrize("family", ["Dream", "llada"])
def test_the_model_is_that_of_transformers_with_a_full_mask(tmp_path: Path, family: str) -> None:
    """Rows of unequal lengths together, each token seen by all."""
    model, _ = masked_dream(3, tmp_path, family)
    texts = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10]]
    tokens = torch.tensor([texts[0], [0, 0, *texts[1]]])
    attended = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]).bool()
    logits = denoiser(tmp_path).logits(tokens, attended, 3)
    for row, text in enumerate(texts):
        everything = torch.zeros(1, 1, len(text), len(text))
        expected = model(torch.tensor([text]), attention_mask=everything).logits[0]
        shifted = family == "Dream"
        assert_close(logits[row], expected[-3 - shifted : len(text) - shifted])


def test_the_engine_takes_weights_under_the_familys_names(tmp_path: Path) -> None:
    _, names = masked_dream(3, tmp_path, "llada")

    async def life() -> None:
        engine = await DiffusionEngine.build(_spec(tmp_path, steps=4, alg="margin"))
        params = SamplingParams(max_tokens=6, temperature=0.0)
        first = await engine.generate([[1, 2]], params)
        other, _ = masked_dream(4, tmp_path / "other", "llada")
        sender = Sender({names(n): t for n, t in weights(other).items()})
        await engine.update(sender.specs(), sender.chunks(), "new")
        second = await engine.generate([[1, 2]], params)
        assert first != second and second[0][0].spans[0].version == "new"
        fresh = await DiffusionEngine.build(_spec(tmp_path / "other", steps=4, alg="margin"))
        assert (await fresh.generate([[1, 2]], params))[0][0].token_ids == second[0][0].token_ids
        assert await fresh.checksums() == await engine.checksums()
        for one in (engine, fresh):
            await one.close()

    asyncio.run(life())


def test_other_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 9}')
    with pytest.raises(ValueError, match=r"'llama' is no masked-diffusion model \(Dream, llada\)"):
        load_denoiser(_spec(tmp_path))


def denoiser(path: Path) -> DenoisingFunctions:
    return load_denoiser(_spec(path)).batch.args[0]  # type: ignore[attr-defined]


def _spec(path: Path, **extra: Any) -> EngineSpec:
    return EngineSpec(
        name="diffusion", model_path=str(path), dtype="float32", max_model_len=64, extra=extra
    )


def test_a_cancelled_row_keeps_the_tokens_that_are_certain() -> None:
    control = PauseControl()
    token: CancelToken = control.begin_work()
    row = DecodingRow([1], torch.Generator().manual_seed(0))
    seen: list[int] = []

    def logits(*given: Any) -> torch.Tensor:
        seen.append(1)
        if len(seen) == 8:
            control.cancel(token)
        return toy_logits(*given)

    decode_all(
        lambda *given: DenoisingBatch(
            DenoisingFunctions(logits, toy_keep, MASK, CPU), DenoisingOptions(), *given
        ),
        [row],
        SamplingParams(max_tokens=12),
        max_rows=1,
        control=control,
        token=token,
        version=lambda: "v",
    )
    ended = row.completion()
    assert ended.finish_reason == "abort" and len(ended.token_ids) < 12
    assert len(ended.token_ids) == len(ended.log_probs) == len(ended.order)
