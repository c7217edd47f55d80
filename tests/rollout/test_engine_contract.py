"""The contract of every engine, checked on live processes against transformers."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_models import (
    MASK,
    VOCAB,
    Sender,
    denoised,
    denoised_log_probs,
    full_logits,
    greedy,
    log_probs,
    masked_dream,
    save,
    tiny_llama,
    weights,
)

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.parallel.parent_watch import process_group_members
from ctrl_megatron.rollout.client import RemoteEngine
from ctrl_megatron.rollout.engine import (
    EngineBroken,
    EngineDied,
    EngineError,
    EngineSpec,
    available_engines,
)
from ctrl_megatron.rollout.launch import EngineProcess, launch_engine
from ctrl_megatron.rollout.weight_update import tensor_checksum
from ctrl_megatron.types import Completion, SamplingParams

# A busy machine may be several times slower than an idle one.
pytestmark = pytest.mark.timeout(900)

PROMPTS = [[1, 2, 3], [7, 8, 9, 10, 11, 12, 13], [5], list(range(20, 60))]
CLOSE = 1e-4


class Bench:
    """One engine process for all tests of a module, launched again when a test has ruined it."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.denoises = name == "diffusion"
        if self.denoises:
            self.models = [masked_dream(seed, path / str(seed))[0] for seed in (0, 1)]
            self.path = path / "0"
        else:
            self.models = [tiny_llama(0), tiny_llama(1)]
            save(self.models[0], path)
        self.loop = BackgroundLoop()
        self.process: EngineProcess | None = None
        self.ruined = False
        self._updates = 0

    @property
    def engine(self) -> RemoteEngine:
        return self._engine

    def run(self, work: Coroutine[Any, Any, Any], seconds: float = 120.0) -> Any:
        return self.loop.submit(asyncio.wait_for(work, seconds)).result()

    def ready(self) -> Bench:
        """A live engine that holds model 0 and is not paused."""
        if self.process is None or self.ruined:
            self.stop()
            self._launch()
        elif self._updates:
            self.load(0)
        return self

    def fresh(self) -> Bench:
        """A live engine whose weights were never updated."""
        self.ruined |= self._updates > 0
        return self.ready()

    def _launch(self) -> None:
        self.process = launch_engine(
            EngineSpec(
                name=self.name,
                model_path=str(self.path),
                dtype="float32",
                max_model_len=1024,
                max_num_seqs=8,
                kv_cache_gib=0.25,
                threads=1,
                may_sleep=True,
                log_path=str(self.path / f"{self.name}.log"),
                startup_timeout=600.0,
            )
        )
        self._engine, self.ruined, self._updates = RemoteEngine(self.process.address), False, 0

    def load(self, which: int) -> str:
        """Put model ``which`` into the engine; the name of the new version."""
        self._updates += 1
        sender, version = Sender(weights(self.models[which])), f"step-{self._updates}"
        self.run(self.engine.update(sender.specs(), sender.chunks(), version))
        return version

    def greedy(self, which: int, prompt: list[int], count: int) -> list[int]:
        """What ``which`` of the models writes at temperature 0."""
        if not self.denoises:
            return greedy(self.models[which], prompt, count)
        logits = full_logits(self.models[which])
        return denoised(logits, prompt, count, alg="entropy", seed=0, t=0.0, steps=count)[0]

    def log_probs(
        self, which: int, prompt: list[int], completion: Completion, temperature: float = 1.0
    ) -> torch.Tensor:
        """The log-probs of a completion by ``which`` of the models."""
        if not self.denoises:
            return log_probs(self.models[which], prompt, completion.token_ids, temperature)
        return denoised_log_probs(self.models[which], prompt, completion, temperature)

    def first_token(self, prompt: list[int]) -> torch.Tensor:
        """(V,) the probabilities of the only token behind ``prompt``."""
        if not self.denoises:
            with torch.no_grad():
                return self.models[0](torch.tensor([prompt])).logits[0, -1].softmax(-1)
        one = full_logits(self.models[0])([*prompt, MASK], len(prompt)).softmax(-1)
        return one * (torch.arange(len(one)) != MASK)

    def generate(self, prompts: list[list[int]], **params: Any) -> list[list[Completion]]:
        return self.run(self.engine.generate(prompts, SamplingParams(**params)))

    def stop(self) -> None:
        if self.process is not None:
            self.run(self._engine.close())
            self.process.stop()
            assert process_group_members(self.process.pid) == []


DENOISING = pytest.param("diffusion", marks=pytest.mark.long)


@pytest.fixture(scope="module", params=["hf", "vllm", "sglang", DENOISING])
def bench_of_module(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    if request.param not in available_engines():
        pytest.skip(f"the optional engine {request.param} is not installed")
    # The oracle's threads and the engine's would wait for each other on few cores.
    torch.set_num_threads(1)
    bench = Bench(request.param, tmp_path_factory.mktemp("tiny"))
    yield bench
    bench.stop()
    bench.loop.close()


@pytest.fixture
def bench(bench_of_module: Bench) -> Bench:
    return bench_of_module.ready()


def members(bench: Bench) -> list[int]:
    """The engine's processes."""
    assert bench.process is not None
    return process_group_members(bench.process.pid)


def assert_explained(completion: Completion, expected: torch.Tensor) -> None:
    """The completion's log-probs are ``expected``."""
    torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=CLOSE, rtol=0)


def test_the_initial_weights_are_named_and_summed(bench_of_module: Bench) -> None:
    bench = bench_of_module.fresh()
    (completion,) = bench.generate([[1, 2]], max_tokens=3)[0]
    assert [(s.version, s.start, s.end) for s in completion.spans] == [("initial", 0, 3)]
    expected = {n: tensor_checksum(t) for n, t in weights(bench.models[0]).items()}
    assert bench.run(bench.engine.checksums()) == expected
    bench.run(bench.engine.health())


def test_a_completion_is_heard_as_soon_as_it_is_drawn(bench: Bench) -> None:
    """Equal prompts with seeds of their own end at different lengths; each is reported once, whole,
    the shorter ones before the longer ones have ended.
    """
    params = SamplingParams(max_tokens=24, n=4, seed=3, stop_token_ids=tuple(range(0, 64, 8)))
    heard: dict[int, tuple[float, Completion]] = {}
    began = time.monotonic()

    def listen(place: int, completion: Completion) -> None:
        assert place not in heard
        heard[place] = time.monotonic() - began, completion

    answers = bench.run(bench.engine.generate(PROMPTS[:2], params, finished=listen))
    assert [heard[place][1] for place in range(8)] == [c for group in answers for c in group]
    if bench.denoises:
        # The order of commitment, not the length, says when a completion is known.
        assert answers == bench.run(bench.engine.generate(PROMPTS[:2], params))
        return
    by_length = sorted(heard.values(), key=lambda entry: len(entry[1].token_ids))
    assert len(by_length[0][1].token_ids) < len(by_length[-1][1].token_ids)
    assert by_length[0][0] < by_length[-1][0]
    assert answers == bench.run(bench.engine.generate(PROMPTS[:2], params))


def test_greedy_is_transformers_greedy(bench: Bench) -> None:
    answers = bench.generate(PROMPTS, max_tokens=12, temperature=0.0)
    assert [len(group) for group in answers] == [1] * len(PROMPTS)
    for prompt, (completion,) in zip(PROMPTS, answers, strict=True):
        assert list(completion.token_ids) == bench.greedy(0, prompt, 12)
        assert completion.finish_reason == "length"
        assert_explained(completion, bench.log_probs(0, prompt, completion))


@pytest.mark.parametrize("truncation", [{}, {"top_k": 20, "top_p": 0.9}])
def test_log_probs_are_those_at_the_temperature_before_truncation(
    bench: Bench, truncation: dict[str, Any]
) -> None:
    answers = bench.generate(PROMPTS, max_tokens=10, temperature=0.7, n=3, seed=5, **truncation)
    assert [len(group) for group in answers] == [3] * len(PROMPTS)
    for prompt, group in zip(PROMPTS, answers, strict=True):
        for completion in group:
            expected = bench.log_probs(0, prompt, completion, 0.7)
            assert_explained(completion, expected)


def test_log_probs_of_given_tokens_are_those_of_the_weights_now(bench: Bench) -> None:
    """Also of a row whose keys are in the cache, beside completions and after an update."""
    row = list(range(20, 60))

    def said() -> torch.Tensor:
        (log_probs,) = bench.run(bench.engine.token_log_probs(row))
        return torch.tensor(log_probs)

    if bench.denoises:
        with pytest.raises(EngineError, match="orders no tokens"):
            said()
        return
    bench.generate([row], max_tokens=1)
    params = SamplingParams(max_tokens=200, seed=1)
    drawing = bench.loop.submit(bench.engine.generate(PROMPTS, params))
    for which in (0, 1):
        if which:
            bench.load(which)
        oracle = log_probs(bench.models[which], row[:1], row[1:])
        torch.testing.assert_close(said(), oracle, atol=CLOSE, rtol=0)
    assert all(len(c.token_ids) == 200 for group in drawing.result(120) for c in group)
    bench.run(bench.engine.pause("abort"))
    bench.run(bench.engine.resume())


def test_a_draw_depends_on_seed_row_and_sample_only(bench: Bench) -> None:
    sampled: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0}
    all_four = bench.generate(PROMPTS, n=3, seed=11, **sampled)
    assert all_four == bench.generate(PROMPTS, n=3, seed=11, **sampled)
    fewer = bench.generate(PROMPTS[:2], n=2, seed=11, **sampled)
    same = [[c.token_ids for c in group[:2]] for group in all_four[:2]]
    assert [[c.token_ids for c in group] for group in fewer] == same
    assert bench.generate(PROMPTS, n=3, seed=12, **sampled) != all_four
    twins = bench.generate([PROMPTS[0]] * 2, n=2, seed=11, **sampled)
    assert len({c.token_ids for group in twins for c in group}) == 4
    # A prompt takes its draws along with its name, wherever it is in a request.
    turned = bench.generate(PROMPTS[1::-1], n=3, seed=11, rows=(1, 0), **sampled)
    first_two = [[c.token_ids for c in group] for group in all_four[:2]]
    assert [[c.token_ids for c in group] for group in turned] == first_two[::-1]
    other = bench.generate(PROMPTS[:1], n=3, seed=11, rows=("mbpp/0:1",), **sampled)
    assert {c.token_ids for c in other[0]}.isdisjoint(first_two[0])


def test_what_is_heard_while_it_is_drawn_is_what_comes_in_the_end(bench: Bench) -> None:
    heard: dict[int, list[tuple[int, ...]]] = defaultdict(list)

    def hear(place: int, tokens: Sequence[int]) -> None:
        heard[place].append(tuple(tokens))

    requests: list[dict[str, Any]] = [
        {"n": 2, "seed": 11},
        {"temperature": 0.0, "log_probs": False},
    ]
    for asked in requests:
        heard.clear()
        params = SamplingParams(max_tokens=16, rows=("a", "b:0", 3, 0), **asked)
        answers = bench.run(bench.engine.generate(PROMPTS, params, hear))
        unheard = bench.run(bench.engine.generate(PROMPTS, params))
        drawn, same = ([c.token_ids for group in g for c in group] for g in (answers, unheard))
        assert drawn == same
        assert [tuple(chain(*heard[place])) for place in range(len(drawn))] == drawn
        # Several prompts share the machine, so not every token needs to come alone.
        assert all(len(pieces) > 4 for pieces in heard.values())
    with pytest.raises(ValueError, match="1024"):
        bench.run(bench.engine.generate([[1] * 1024], replace(params, rows=("long",)), hear))


def test_samples_of_a_prompt_share_its_keys_and_the_work_is_counted(bench: Bench) -> None:
    prompts = [[(i * j) % VOCAB for j in range(1, 201)] for i in range(3, 7)]
    (before,) = bench.run(bench.engine.counters()).values()
    answers = bench.generate(prompts, n=8, max_tokens=6, seed=3)
    (after,) = bench.run(bench.engine.counters()).values()
    grown = {name: value - before[name] for name, value in after.items()}
    assert grown["drawn_tokens"] == sum(len(c.token_ids) for group in answers for c in group)
    assert grown["busy_seconds"] > 0 and after["under_way"] == 0
    if bench.name in ("hf", "diffusion"):
        assert set(grown) == {"drawn_tokens", "busy_seconds", "under_way"}
        return
    assert grown["prompt_tokens"] == 4 * 8 * 200 and grown["preemptions"] == 0
    shared = grown["cached_tokens"] / grown["prompt_tokens"]
    print(f"{bench.name}: {shared:.3f} of the prompts' tokens were cached; {grown}")
    # Seven of eight samples, all but the end of the prompt.
    assert 0.8 < shared < 7 / 8
    # 32 completions, of which it draws eight at the same time.
    assert 0 < grown["queued_seconds"] < 32 * grown["busy_seconds"]


def test_draws_without_a_seed_differ(bench: Bench) -> None:
    first, second = (bench.generate([[1, 2]], max_tokens=16)[0][0] for _ in range(2))
    assert first.token_ids != second.token_ids


def test_draws_follow_the_truncated_distribution(bench: Bench) -> None:
    prompt = [3, 1, 4]
    probabilities = bench.first_token(prompt)
    likeliest = probabilities.topk(4).indices.tolist()
    answers = bench.generate([prompt], max_tokens=1, n=400, seed=0, top_k=4)[0]
    drawn = [c.token_ids[0] for c in answers]
    assert set(drawn) <= set(likeliest)
    for token in likeliest:
        share = float(probabilities[token] / probabilities[likeliest].sum())
        error = math.sqrt(share * (1 - share) / len(drawn))
        assert abs(drawn.count(token) / len(drawn) - share) < 5 * error + 1e-9


def test_a_stop_token_ends_a_completion_and_is_kept(bench: Bench) -> None:
    free = bench.greedy(0, PROMPTS[0], 12)
    stop = free[5]
    (completion,) = bench.generate(
        [PROMPTS[0]], max_tokens=12, temperature=0.0, stop_token_ids=(stop,)
    )[0]
    assert list(completion.token_ids) == free[: free.index(stop) + 1]
    assert completion.finish_reason == "stop"
    assert len(completion.log_probs) == len(completion.token_ids)


def test_an_update_changes_everything_at_once(bench: Bench) -> None:
    before = bench.generate(PROMPTS, max_tokens=8, temperature=0.0)
    version = bench.load(1)
    after = bench.generate(PROMPTS, max_tokens=8, temperature=0.0)
    for prompt, (completion,) in zip(PROMPTS, after, strict=True):
        # Same prompts as before: cached prefixes of the old weights would show here.
        assert list(completion.token_ids) == bench.greedy(1, prompt, 8)
        assert_explained(completion, bench.log_probs(1, prompt, completion))
        assert [(s.version, s.start, s.end) for s in completion.spans] == [(version, 0, 8)]
    assert before != after
    expected = {n: tensor_checksum(t) for n, t in weights(bench.models[1]).items()}
    assert bench.run(bench.engine.checksums()) == expected


def test_weights_of_another_dtype_are_cast(bench: Bench) -> None:
    rounded = {n: t.bfloat16() for n, t in weights(bench.models[1]).items()}
    sender = Sender(rounded, per_chunk=3)
    bench.run(bench.engine.update(sender.specs(), sender.chunks(), "rounded"))
    bench._updates += 1
    expected = {n: tensor_checksum(t.float()) for n, t in rounded.items()}
    assert bench.run(bench.engine.checksums()) == expected


def test_running_completions_cross_an_update(bench: Bench) -> None:
    prompt, count = [1, 2, 3], 150 if bench.denoises else 900
    # On a busy machine the completion may not have begun when the update arrives; then try again.
    for pause in (0.3, 0.6, 1.2, 2.4):
        before = bench.load(0)
        running = bench.loop.submit(
            bench.engine.generate([prompt], SamplingParams(max_tokens=count, seed=1))
        )
        time.sleep(pause)
        after = bench.load(1)
        ((completion,),) = running.result(timeout=60)
        if len(completion.spans) > 1:
            break
    if bench.denoises:
        # Tokens of both versions lie in any order.
        old, new = (bench.log_probs(which, prompt, completion) for which in (0, 1))
        versions = [span.version for span in completion.spans for _ in range(span.start, span.end)]
        assert len(versions) == count and set(versions) == {before, after}
        assert_explained(
            completion, torch.where(torch.tensor([v == before for v in versions]), old, new)
        )
        return
    assert len(completion.spans) == 2
    first, second = completion.spans
    assert (first.version, second.version) == (before, after)
    assert (first.start, first.end, second.end) == (0, second.start, count)
    old, new = (log_probs(m, prompt, completion.token_ids) for m in bench.models)
    assert_explained(completion, torch.cat([old[: first.end], new[first.end :]]))


@pytest.mark.parametrize("kind", ["unknown", "missing", "mis-shaped"])
def test_a_wrong_update_is_refused_before_anything_changes(bench: Bench, kind: str) -> None:
    tensors = dict(weights(bench.models[1]))
    if kind == "unknown":
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 2)
    elif kind == "missing":
        del tensors["model.norm.weight"]
    else:
        tensors["model.norm.weight"] = torch.zeros(65)
    named = "layers.9" if kind == "unknown" else "model.norm.weight"
    sender, held = Sender(tensors), bench.run(bench.engine.checksums())
    with pytest.raises(ValueError, match=rf"{kind}.*{named}"):
        bench.run(bench.engine.update(sender.specs(), sender.chunks(), "wrong"))
    assert sender.pulled == 0
    (completion,) = bench.generate([PROMPTS[0]], max_tokens=8, temperature=0.0)[0]
    assert list(completion.token_ids) == bench.greedy(0, PROMPTS[0], 8)
    assert bench.run(bench.engine.checksums()) == held
    assert completion.spans[0].version != "wrong"


def test_pause_holds_new_requests_until_resume(bench: Bench) -> None:
    bench.run(bench.engine.pause("keep"))
    waiting = bench.loop.submit(bench.engine.generate([[1]], SamplingParams(max_tokens=2)))
    with pytest.raises(TimeoutError):
        waiting.result(timeout=0.5)
    bench.run(bench.engine.resume())
    assert len(waiting.result(timeout=30)[0][0].token_ids) == 2


def test_pause_abort_ends_running_completions(bench: Bench) -> None:
    # On a busy machine the completions may end before the pause arrives; then draw again.
    for _ in range(8):
        running = bench.loop.submit(
            bench.engine.generate([[1, 2]] * 2, SamplingParams(max_tokens=1000, seed=2))
        )
        time.sleep(0.1)
        bench.run(bench.engine.pause("abort"))
        drawn = [completion for (completion,) in running.result(timeout=30)]
        bench.run(bench.engine.resume())
        if all(completion.finish_reason == "abort" for completion in drawn):
            break
    for completion in drawn:
        assert completion.finish_reason == "abort" and len(completion.token_ids) < 1000
        assert len(completion.log_probs) == len(completion.token_ids)
    assert len(bench.generate([[1]], max_tokens=3)[0][0].token_ids) == 3


def test_an_update_leaves_a_paused_engine_paused(bench: Bench) -> None:
    bench.run(bench.engine.pause("keep"))
    bench.load(1)
    waiting = bench.loop.submit(bench.engine.generate([[1]], SamplingParams(max_tokens=2)))
    with pytest.raises(TimeoutError):
        waiting.result(timeout=0.5)
    bench.run(bench.engine.resume())
    ((completion,),) = waiting.result(timeout=30)
    assert_explained(completion, bench.log_probs(1, [1], completion))


def test_prompts_that_cannot_be_served_are_refused(bench: Bench) -> None:
    for prompts, tokens, message in [
        ([[1], []], 2, "row 1 is empty"),
        ([[1] * 1020], 5, "row 0 .*max_model_len=1024"),
        ([[VOCAB]], 2, "outside"),
    ]:
        with pytest.raises(ValueError, match=message):
            bench.generate(prompts, max_tokens=tokens)


def test_a_light_sleeper_keeps_its_weights(bench: Bench) -> None:
    bench.load(1)
    before = bench.generate(PROMPTS, max_tokens=6, temperature=0.0)
    bench.run(bench.engine.sleep(1))
    with pytest.raises(EngineError, match=r"sleeps .*kv_cache, weights"):
        bench.generate([[1]], max_tokens=2)
    with pytest.raises(EngineError, match="the engine sleeps"):
        bench.run(bench.engine.sleep(2))
    bench.run(bench.engine.health())
    bench.run(bench.engine.wake(["weights", "kv_cache"]))
    assert bench.generate(PROMPTS, max_tokens=6, temperature=0.0) == before


def test_a_deep_sleeper_wakes_for_an_update_and_then_for_its_cache(bench: Bench) -> None:
    bench.run(bench.engine.sleep(2))
    sender = Sender(weights(bench.models[1]))
    with pytest.raises(EngineError, match="sleeps"):
        bench.run(bench.engine.update(sender.specs(), sender.chunks(), "too early"))
    bench.run(bench.engine.wake(["weights"]))
    with pytest.raises(EngineError, match=r"cannot wake \['weights'\]; asleep is \['kv_cache'\]"):
        bench.run(bench.engine.wake(["weights"]))
    with pytest.raises(EngineError, match="forgot its weights"):
        bench.run(bench.engine.checksums())
    bench.load(1)
    expected = {n: tensor_checksum(t) for n, t in weights(bench.models[1]).items()}
    assert bench.run(bench.engine.checksums()) == expected
    with pytest.raises(EngineError, match=r"sleeps .*kv_cache"):
        bench.generate([[1]], max_tokens=2)
    bench.run(bench.engine.wake(["kv_cache"]))
    for prompt, (completion,) in zip(
        PROMPTS, bench.generate(PROMPTS, max_tokens=8, temperature=0.0), strict=True
    ):
        assert list(completion.token_ids) == bench.greedy(1, prompt, 8)


def test_log_probs_are_left_out_unless_requested(bench: Bench) -> None:
    (completion,) = bench.generate([[1, 2]], max_tokens=4, temperature=0.0, log_probs=False)[0]
    assert completion.log_probs == ()
    assert list(completion.token_ids) == bench.greedy(0, [1, 2], 4)


def test_many_calls_at_once_keep_their_answers_apart(bench: Bench) -> None:
    async def ask() -> list[list[list[Completion]]]:
        params = SamplingParams(max_tokens=4, temperature=0.0)
        calls = [bench.engine.generate([[token, 9]], params) for token in range(24)]
        return list(await asyncio.gather(*calls))

    for token, ((completion,),) in enumerate(bench.run(ask())):
        assert list(completion.token_ids) == bench.greedy(0, [token, 9], 4)


def test_fifty_updates_leave_nothing_behind(bench: Bench) -> None:
    def held() -> tuple[int, int]:
        pids = [Path(f"/proc/{pid}") for pid in members(bench)]
        anonymous = (
            int(line.split()[1])
            for pid in pids
            for line in (pid / "smaps_rollup").read_text().splitlines()
            if line.startswith("Pss_Anon:")
        )
        return sum(anonymous) << 10, sum(len(list((pid / "fd").iterdir())) for pid in pids)

    def ten_updates_later() -> tuple[int, int]:
        for number in range(10):
            bench.load(number % 2)
        return held()

    seen = [ten_updates_later() for _ in range(6)]
    grown = [after - before for (before, _), (after, _) in pairwise(seen)]
    size = sum(t.numel() * t.element_size() for t in weights(bench.models[0]).values())
    # A copy kept of each would be ten every time; an allocator takes its steps only now and then.
    assert statistics.median(grown) < 5 * size, f"{grown} bytes more after ten each, of {size}"
    (_, files), *_, (_, files_after) = seen
    assert files_after <= files + 2
    assert bench.run(bench.engine.checksums()) == {
        name: tensor_checksum(tensor) for name, tensor in weights(bench.models[1]).items()
    }


def test_an_idle_or_paused_engine_leaves_the_cores_to_others(bench: Bench) -> None:
    ticks = os.sysconf("SC_CLK_TCK")

    def used() -> float:
        stats = (Path(f"/proc/{pid}/stat").read_text() for pid in members(bench))
        # After the name in brackets; user and system time are fields 14 and 15.
        return sum(sum(map(int, s.rpartition(")")[2].split()[11:13])) for s in stats) / ticks

    bench.generate([PROMPTS[0]], max_tokens=2)
    for paused in (False, True):
        if paused:
            bench.run(bench.engine.pause("keep"))
        time.sleep(0.2)
        before = used()
        time.sleep(1.0)
        assert used() - before < 0.3, f"{'paused' if paused else 'idle'}"
    bench.run(bench.engine.resume())
    assert len(bench.generate([PROMPTS[0]], max_tokens=2)[0][0].token_ids) == 2


def test_an_update_that_fails_half_way_breaks_the_engine(bench: Bench) -> None:
    bench.ruined = True
    sender = Sender(weights(bench.models[1]))
    with pytest.raises(RuntimeError, match="the trainer fell over"):
        bench.run(bench.engine.update(sender.specs(), sender.chunks(fail_after=2), "half"))
    with pytest.raises(EngineBroken, match=r"half.*the trainer fell over"):
        bench.generate([[1]], max_tokens=2)


def test_a_killed_host_is_named_and_leaves_nothing_behind(bench_of_module: Bench) -> None:
    # Any live engine will do, also a broken one: starting another takes long.
    bench = bench_of_module if bench_of_module.process else bench_of_module.ready()
    bench.ruined = True
    assert bench.process is not None
    pid = bench.process.pid
    assert pid in process_group_members(pid)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match=rf"{bench.name} \(pid {pid}") as caught:
        bench.generate([[1]], max_tokens=2)
    assert bench.process.address.log_path in str(caught.value)
    # The engine's own processes end with their host, without a signal.
    deadline = time.monotonic() + 20
    while process_group_members(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert process_group_members(pid) == []
    assert not bench.process.alive()
