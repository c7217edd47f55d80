"""What every strategy promises, against transformers and against each other, over gloo."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import (
    EXPERTS,
    FAMILIES,
    exact_models,
    predicted,
    random_batch,
    reference_gradients,
    reference_log_probs,
    save_tiny,
    weights_of,
    widest_gap,
)
from world import run_world

from ctrl_megatron.memory.model_state import trained_model_memory
from ctrl_megatron.models.hf_config import read_shape
from ctrl_megatron.parallel.layout import Layout

WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [3.0] * 6}
ANY = {
    "mistral": (transformers.MistralConfig, {"sliding_window": 8}),
    "phi3": (
        transformers.Phi3Config,
        {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 8},
    ),
    # Rows of more than 12 tokens are rotated otherwise than shorter ones.
    "phi3_long": (
        transformers.Phi3Config,
        {
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
            **{"original_max_position_embeddings": 12, "rope_parameters": LONGROPE},
        },
    ),
    "granite": (
        transformers.GraniteConfig,
        {
            **{"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
            **{"attention_multiplier": 0.2, "tie_word_embeddings": True},
        },
    ),
    "smollm3": (transformers.SmolLM3Config, {"pad_token_id": 0}),
    "gemma2": (
        transformers.Gemma2Config,
        {
            **{"head_dim": 12, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
            **WINDOW,
        },
    ),
    "gemma3_text": (transformers.Gemma3TextConfig, {"head_dim": 12, **WINDOW}),
}
"""Families that Megatron's table does not know, beside those of ``tiny_models``."""
PLAIN = ("gemma2", "phi3_long")
"""Those whose rows are not packed."""


def a_model(family: str, directory: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, family, {**ANY, **FAMILIES, **EXPERTS}[family])
        # Others have layers of several kinds.
        layers = 4 if family.startswith(("gemma", "smollm")) else 2
        return save_tiny(family, directory, num_hidden_layers=layers)


def assert_same(left: Path, right: Path, most: float) -> None:
    there, here = weights_of(left), weights_of(right)
    assert there.keys() == here.keys()
    for name, want in there.items():
        gap = float((want - here[name]).norm() / want.norm())
        assert gap <= most, (name, gap)


@dataclass(frozen=True)
class Reference:
    """What transformers computes of a model and a batch."""

    source: Path
    log_probs: torch.Tensor
    entropies: torch.Tensor
    logits: list[torch.Tensor]
    """By row (n, V), before each of its n response tokens, computed in float64."""
    gradients: dict[str, torch.Tensor]


def reference(source: Path, batch: dict, folder: Path) -> Reference:
    usual = transformers.AutoModelForCausalLM.from_pretrained
    rows, logits = (batch[name] for name in ("input_ids", "attention_mask", "response_mask")), []
    with pytest.MonkeyPatch.context() as patch:
        # The other kinds of attention leave soft caps out.
        eager = partial(usual, attn_implementation="eager")
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", eager)
        log_probs, entropies = reference_log_probs(source, batch, 0.7)
        gradients = reference_gradients(source, batch, folder / "theirs" / source.name)
        with exact_models() as load, torch.no_grad():
            model = load(source)
            for ids, seen, mask in zip(*rows, strict=True):
                row = model(ids[seen.bool()][None]).logits[0]
                logits.append(row[predicted(seen, mask) - 1].float())
    return Reference(source, log_probs, entropies, logits, weights_of(gradients))


def check(wanted: Reference, results: list[Any], out: Path, name: str) -> None:
    """Log-probs, logits and gradients are transformers', and a checkpoint continues exactly."""
    for result in results:
        log_probs, entropies = result[name]["log_probs"]
        torch.testing.assert_close(log_probs, wanted.log_probs, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropies, wanted.entropies, atol=1e-5, rtol=0)
        if result[name]["logits"] is not None:
            for own, want in zip(result[name]["logits"], wanted.logits, strict=True):
                assert float((own - want).norm() / want.norm()) <= 1e-5, name
        *_, third, again = result[name]["metrics"]
        assert third == again and third["loss"] != result[name]["metrics"][0]["loss"]
    assert_same(wanted.source, out / "before" / name, 0.0)
    assert_same(out / "after" / name, out / "resumed" / name, 0.0)
    gap, weight = widest_gap(weights_of(out / "gradients" / name), wanted.gradients)
    assert gap <= 1e-5, (name, weight, gap)


def same_metrics(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-9)


def same_steps(results: list[Any], left: str, right: str, out: Path) -> None:
    for result in results:
        same_metrics(result[left]["metrics"], result[right]["metrics"])
    assert_same(out / "after" / left, out / "after" / right, 1e-5)


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("llama", 2),
        pytest.param("qwen3_5_text", 2, marks=pytest.mark.long),
        *(pytest.param("llama", n, marks=pytest.mark.long) for n in (1, 4)),
    ],
)
def test_both_strategies_keep_it_and_take_the_same_steps(
    tmp_path: Path, family: str, ranks: int
) -> None:
    source = save_tiny(family, tmp_path / family, num_hidden_layers=2)
    batch = random_batch(seed=3, rows=8, group=4)
    common = {"directory": str(source)}
    results = run_world(
        "promised:keep",
        ranks,
        layout={"data": ranks},
        cases={
            "megatron": {"strategy": "megatron", **common},
            "fsdp": {"strategy": "fsdp", **common},
            "again": {
                **{"strategy": "fsdp", "build": {"recompute_granularity": "full"}},
                **{"token_budget": 21, "logprob_chunk": 3, "shared_prefix": False, **common},
            },
        },
        batch=batch,
        out=str(tmp_path / "out"),
    )
    wanted = reference(source, batch, tmp_path)
    for name in ("megatron", "fsdp", "again"):
        check(wanted, results, tmp_path / "out", name)
    same_steps(results, "megatron", "fsdp", tmp_path / "out")
    same_steps(results, "fsdp", "again", tmp_path / "out")
    assert all(result["fsdp"]["packs"] for result in results)
    planned = trained_model_memory(
        *(read_shape(source, "fsdp"), Layout(data=ranks)),
        **{"pp": 0, "dtype": "float32", "distributed": True},
    )
    for part in ("parameters", "moments"):
        most = max(result["fsdp"][part] for result in results)
        assert most == pytest.approx(getattr(planned, part), rel=0.02)
    assert [r["fsdp"]["flops"] for r in results] == [r["megatron"]["flops"] for r in results]


def test_a_rank_without_rows_takes_the_same_steps(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "llama", num_hidden_layers=2)
    given = {"directory": str(source), "batch": random_batch(seed=3, rows=8, group=4)}
    step = "promised:step_with_all_rows_on_one_rank"
    (alone,) = run_world(step, 1, layout={}, **given)
    for place, result in enumerate(run_world(step, 2, layout={"data": 2}, **given)):
        for strategy, (log_probs, metrics) in result.items():
            wanted = alone[strategy]
            same_metrics(metrics, wanted[1])
            assert len(log_probs) == (0 if place else 8)
            torch.testing.assert_close(log_probs, wanted[0][: len(log_probs)], atol=1e-6, rtol=0)


def test_rows_beyond_the_context_are_refused(tmp_path: Path) -> None:
    """A dynamic rope of transformers rotates the rows that follow such a row otherwise."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    given = {"rope_parameters": rope, "max_position_embeddings": 16}
    source = save_tiny("llama", tmp_path / "llama", num_hidden_layers=2, **given)
    (found,) = run_world(
        "promised:longest_rows",
        1,
        layout={},
        directory=str(source),
        batch=random_batch(seed=3, prompt=40),
    )
    for said in found.values():
        assert re.fullmatch(r"row \d has \d\d tokens, .* max_position_embeddings=16", said), found


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "sharded"), [(2, 1), (4, 2)])
def test_copies_of_shards_take_the_same_steps(tmp_path: Path, ranks: int, sharded: int) -> None:
    """Hybrid sharding: gradients are summed over the copies."""
    source = save_tiny("llama", tmp_path / "llama", num_hidden_layers=2)
    batch = random_batch(seed=3, rows=8, group=4)
    case = {"fsdp": {"strategy": "fsdp", "directory": str(source)}}
    wanted = reference(source, batch, tmp_path)
    for copy, out in ((sharded, tmp_path / "copies"), (None, tmp_path / "whole")):
        results = run_world(
            "promised:keep",
            ranks,
            layout={"data": ranks, "sharded": copy},
            cases=case,
            batch=batch,
            out=str(out),
        )
        check(wanted, results, out, "fsdp")
        found = [step for result in results for step in result["fsdp"]["metrics"]]
        if copy:
            expected = found
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-9)
    assert_same(tmp_path / "whole/after/fsdp", tmp_path / "copies/after/fsdp", 1e-5)


@pytest.mark.long
def test_bfloat16_keeps_steps_that_only_float32_holds(tmp_path: Path) -> None:
    """Shards are float32, and gradients are summed in it: those of bfloat16 passes point where
    float32's do, and a step of 1e-5 on weights around 1 is not rounded away."""
    source = save_tiny("llama", tmp_path / "llama", num_hidden_layers=2)
    for result in run_world(
        "promised:masters",
        2,
        layout={"data": 2},
        directory=str(source),
        batch=random_batch(seed=3, rows=8, group=4),
    ):
        assert result["types"] == {torch.float32}
        assert 0.0 < result["gap"] < 0.1
        assert result["norms"]["bfloat16"] == pytest.approx(result["norms"]["float32"], rel=0.03)
        assert result["change"] == pytest.approx(1e-5, rel=0.05)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "families",
    [
        ("llama", "qwen2", "qwen3"),
        ("qwen3_5_text", "qwen3_5_moe_text"),
        ("mistral", "phi3", "phi3_long"),
        ("granite", "smollm3"),
        ("gemma2", "gemma3_text"),
    ],
    ids=" ".join,
)
def test_every_family_keeps_it_on_any_number_of_ranks(
    tmp_path: Path, families: tuple[str, ...]
) -> None:
    """Rows that are packed and rows apart are transformers', and take the same steps."""
    batch = random_batch(seed=3, rows=8, group=4)
    wanted, cases = {}, {}
    for family in families:
        source = a_model(family, tmp_path / family)
        wanted[family] = reference(source, batch, tmp_path)
        cases[family] = {"strategy": "fsdp", "directory": str(source)}
    apart = {f"{family} apart": {**case, "apart": True} for family, case in cases.items()}
    first: dict[str, Any] = {}
    for ranks in (2, 1, 4):
        out = tmp_path / f"on_{ranks}"
        results = run_world(
            "promised:keep",
            ranks,
            layout={"data": ranks},
            cases=cases if first else {**cases, **apart},
            batch=batch,
            out=str(out),
        )
        first = first or results[0]
        for family in cases:
            check(wanted[family], results, out, family)
            for result in results:
                assert result[family]["packs"] == (family not in PLAIN)
                same_metrics(result[family]["metrics"], first[family]["metrics"])
            assert_same(tmp_path / "on_2/after" / family, out / "after" / family, 1e-5)
        for name in apart if ranks == 2 else ():
            check(wanted[name.split()[0]], results, out, name)
            assert not any(result[name]["packs"] for result in results)
            same_steps(results, name.split()[0], name, out)


@pytest.mark.long
def test_a_checkpoint_continues_on_other_ranks_and_with_the_other_strategy(tmp_path: Path) -> None:
    source, out = save_tiny("qwen3", tmp_path / "qwen3", num_hidden_layers=2), tmp_path / "out"
    batch = random_batch(seed=3, rows=8, group=4)
    (first, *_) = run_world(
        "promised:keep",
        2,
        layout={"data": 2},
        cases={s: {"strategy": s, "directory": str(source)} for s in ("fsdp", "megatron")},
        batch=batch,
        out=str(out),
    )
    for saved, strategy, ranks in (
        ("fsdp", "fsdp", 1),
        ("fsdp", "fsdp", 4),
        ("fsdp", "megatron", 1),
        ("megatron", "fsdp", 1),
    ):
        to = out / f"{saved}_{strategy}_{ranks}"
        results = run_world(
            "promised:resume",
            ranks,
            layout={"data": ranks},
            strategy=strategy,
            directory=str(source),
            saved=str(out / "checkpoint" / saved),
            batch=batch,
            out=str(to),
        )
        for result in results:
            assert result == pytest.approx(first[saved]["metrics"][2], rel=1e-5, abs=1e-9)
        assert_same(out / "after" / saved, to, 1e-5)


@pytest.mark.long
def test_a_model_whose_packed_rows_differ_is_refused_with_the_number(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "llama")
    (said,) = run_world("promised:refuse", 1, directory=str(source))
    assert re.search(r"log-probs of packed rows of a 'llama' model differ by 0\.\d+ from", said)
