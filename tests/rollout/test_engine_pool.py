"""Several engines as one: dealing, order, failures; and real ones that load the same weights."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_models import Sender, save, tiny_llama, weights

from ctrl_megatron.rollout.client import RemoteEngine
from ctrl_megatron.rollout.engine import (
    CompletionListener,
    EngineBroken,
    EngineDied,
    EngineError,
    EngineSpec,
    EngineWithoutWeights,
)
from ctrl_megatron.rollout.launch import EngineProcess
from ctrl_megatron.rollout.pool import EnginePool
from ctrl_megatron.steps.performance import engine_balance_metric
from ctrl_megatron.types import Completion, SamplingParams, VersionSpan


class Clockwork:
    """An engine whose answer to the prompt [row, length] is ``length`` tokens that tell the row.

    A token takes one turn of the event loop; ``at_once`` is the most it ever drew together.
    """

    def __init__(self, dies_at: int = -1, error: type[EngineError] = EngineDied) -> None:
        self.rows: list[int] = []
        self.calls = self.running = self.at_once = 0
        self.dies_at, self.error = dies_at, error

    async def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        finished: CompletionListener | None = None,
    ) -> list[list[Completion]]:
        self.calls += 1
        self.running += len(prompts) * params.n
        self.at_once = max(self.at_once, self.running)
        try:
            groups: list[list[Completion]] = []
            for row, prompt in zip(params.prompt_names(len(prompts)), prompts, strict=True):
                groups.append(await self.answers(row, prompt[0], prompt[1], params.n))
                for number, completion in enumerate(groups[-1] if finished else ()):
                    cast(CompletionListener, finished)(
                        (len(groups) - 1) * params.n + number, completion
                    )
            return groups
        finally:
            self.running -= len(prompts) * params.n

    async def answers(self, row: Any, told: int, length: int, n: int) -> list[Completion]:
        assert row == told
        self.rows.append(row)
        for _ in range(length):
            await asyncio.sleep(0)
        if self.dies_at == row:
            raise self.error(f"engine clock (pid 7) died at row {row}")
        return [
            Completion(
                token_ids=(row * 10 + j,) * length,
                log_probs=(0.0,) * length,
                finish_reason="stop",
                spans=(VersionSpan("v", 0, length),),
            )
            for j in range(n)
        ]


def pool_of(
    engines: list[Any], *, at_once: int = 4, joins: bool = True, first: int = 0
) -> EnginePool:
    named = {f"clock {i}": engine for i, engine in enumerate(engines)}
    return EnginePool(named, at_once=at_once, joins_calls=joins, first=first)


def params(n: int = 1, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=50, n=n, **more)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=40),
    engines=st.integers(1, 5),
    n=st.integers(1, 3),
    at_once=st.integers(1, 9),
    joins=st.booleans(),
    first=st.integers(0, 7),
)
def test_answers_come_in_the_order_of_the_prompts_whoever_drew_them(
    lengths: list[int], engines: int, n: int, at_once: int, joins: bool, first: int
) -> None:
    clocks = [Clockwork() for _ in range(engines)]
    pool = pool_of(clocks, at_once=at_once, joins=joins, first=first)
    heard: dict[int, Completion] = {}
    prompts = [[i, k] for i, k in enumerate(lengths)]
    done = asyncio.run(pool.generate(prompts, params(n), finished=heard.__setitem__))
    assert [heard[place] for place in range(len(heard))] == [c for group in done for c in group]
    told = [[(c.token_ids[0], len(c.token_ids)) for c in group] for group in done]
    assert told == [[(i * 10 + j, k) for j in range(n)] for i, k in enumerate(lengths)]
    # A group's samples have one engine, which is never given more than it has room for.
    assert sorted(row for clock in clocks for row in clock.rows) == list(range(len(lengths)))
    assert all(clock.at_once <= max(at_once, n) for clock in clocks)
    assert sum(pool.take_drawn_token_counts()) == n * sum(lengths) and not any(
        pool.take_drawn_token_counts()
    )
    # No engine is idle while there are prompts for all.
    assert sum(bool(clock.rows) for clock in clocks) == min(engines, len(lengths))


def test_a_long_answer_holds_up_its_own_engine_only() -> None:
    clocks = [Clockwork(), Clockwork()]
    lengths = [500] + [5] * 60
    pool = pool_of(clocks, at_once=1)
    asyncio.run(pool.generate([[i, k] for i, k in enumerate(lengths)], params()))
    assert clocks[0].rows == [0] and len(clocks[1].rows) == 60


def test_engines_that_serve_one_call_after_the_other_get_large_calls() -> None:
    clocks = [Clockwork() for _ in range(4)]
    prompts = [[i, 1] for i in range(64)]
    asyncio.run(pool_of(clocks, at_once=64, joins=False).generate(prompts, params(2)))
    assert [clock.calls for clock in clocks] == [1] * 4
    asyncio.run(pool_of(clocks, at_once=64, joins=False).generate(prompts[:2], params(2)))
    assert sum(clock.calls for clock in clocks) == 6


def test_pools_over_the_same_engines_begin_with_different_ones() -> None:
    clocks = [Clockwork() for _ in range(4)]
    for first in range(4):
        asyncio.run(pool_of(clocks, first=first).generate([[0, 1]], params()))
    assert [clock.calls for clock in clocks] == [1] * 4


def test_the_first_failure_ends_the_call_and_leaves_no_request_behind() -> None:
    clocks = [Clockwork(), Clockwork(dies_at=4, error=EngineError), Clockwork()]
    pool = pool_of(clocks, at_once=2)

    async def fail_then_go_on() -> list[list[Completion]]:
        lengths = [5] * 6 + [10_000] * 20
        with pytest.raises(EngineError, match=r"engine clock \(pid 7\) died at row 4"):
            await pool.generate([[i, k] for i, k in enumerate(lengths)], params())
        assert [clock.running for clock in clocks] == [0, 0, 0]
        clocks[1].dies_at = -1
        return await pool.generate([[i, 3] for i in range(30)], params())

    assert len(asyncio.run(fail_then_go_on())) == 30


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    dies_at=st.lists(st.integers(0, 39), min_size=1, max_size=4),
    kind=st.sampled_from([EngineDied, EngineBroken, EngineWithoutWeights]),
    n=st.integers(1, 3),
    at_once=st.integers(1, 9),
    joins=st.booleans(),
)
def test_what_a_lost_engine_was_asked_for_goes_to_the_others(
    lengths: list[int],
    dies_at: list[int],
    kind: type[EngineError],
    n: int,
    at_once: int,
    joins: bool,
) -> None:
    # Each engine but the first is lost at one row, if it gets that row.
    clocks = [Clockwork(), *(Clockwork(row, kind) for row in dies_at)]
    pool = pool_of(clocks, at_once=at_once, joins=joins)
    done = asyncio.run(pool.generate([[i, k] for i, k in enumerate(lengths)], params(n)))
    told = [[(c.token_ids[0], len(c.token_ids)) for c in group] for group in done]
    assert told == [[(i * 10 + j, k) for j in range(n)] for i, k in enumerate(lengths)]
    assert sum(pool.take_drawn_token_counts()) == n * sum(lengths)
    assert all(clock.running == 0 for clock in clocks)
    assert all(member.sequences == member.tokens == 0 for member in pool._members)


def test_the_loss_of_all_engines_ends_the_call() -> None:
    pool = pool_of([Clockwork(dies_at=1), Clockwork(dies_at=1)], at_once=1)
    with pytest.raises(EngineDied, match="died at row 1"):
        asyncio.run(pool.generate([[i, 5] for i in range(9)], params()))


def test_two_calls_share_the_room() -> None:
    clocks = [Clockwork(), Clockwork()]
    pool = pool_of(clocks, at_once=2)

    async def both() -> list[list[list[Completion]]]:
        prompts = [[i, 7] for i in range(20)]
        return await asyncio.gather(*(pool.generate(prompts, params()) for _ in range(2)))

    first, second = asyncio.run(both())
    assert first == second and max(clock.at_once for clock in clocks) == 2


def test_balance_is_what_the_laziest_drew_of_what_the_busiest_drew() -> None:
    clocks: list[Any] = [Clockwork(), Clockwork()]
    pool = pool_of(clocks)
    asyncio.run(pool.generate([[0, 30], [1, 10]], params()))
    groups: Any = SimpleNamespace(gather_data_ranks=lambda mine: [mine, [10, 10]])
    assert engine_balance_metric(pool, groups) == {"perf/engine_balance": 20 / 40}
    alone: Any = SimpleNamespace(gather_data_ranks=lambda mine: [mine])
    assert engine_balance_metric(pool, alone) == {} == engine_balance_metric(None, alone)


# Real engines


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    folder = tmp_path_factory.mktemp("pool")
    path = save(tiny_llama(0), folder / "model")
    spec = EngineSpec(
        name="hf", model_path=str(path), dtype="float32", threads=1, max_model_len=600_000
    )
    started = []
    try:
        for i in range(2):
            log = str(folder / f"{i}.log")
            started.append(EngineProcess(replace(spec, title=f"hf {i} on here", log_path=log)))
        for process in started:
            process.wait_ready()
        yield started
    finally:
        for process in started:
            process.stop()


def connected(processes: list[EngineProcess], **options: Any) -> EnginePool:
    engines = {process.address.name: process.connect() for process in processes}
    return EnginePool(engines, **{"at_once": 8, "joins_calls": True, **options})


def test_who_draws_does_not_matter(processes: list[EngineProcess]) -> None:
    prompts = [[1 + i, 5, 9] for i in range(12)]
    asked = SamplingParams(max_tokens=6, n=2, seed=4)

    async def compare() -> None:
        pool, alone = connected(processes), processes[0].connect()
        several = await pool.generate(prompts, asked)
        whole = await alone.generate(prompts, asked)
        part = await alone.generate(prompts[5:], replace(asked, rows=tuple(range(5, 12))))
        tokens = [[c.token_ids for c in group] for group in whole]
        assert [[c.token_ids for c in group] for group in several] == tokens
        assert [[c.token_ids for c in group] for group in part] == tokens[5:]
        assert len({tuple(group) for group in tokens}) == 12
        assert all(pool.take_drawn_token_counts())
        with pytest.raises(ValueError, match="prompt in row 3 is empty"):
            await pool.generate([[1], [2], [3], []], asked)
        await pool.close()
        await alone.close()

    asyncio.run(compare())


def test_one_stream_of_weights_reaches_every_engine_and_each_is_checked(
    processes: list[EngineProcess],
) -> None:
    new = Sender(weights(tiny_llama(1)))
    other = Sender(weights(tiny_llama(2)))

    async def push() -> None:
        pool, alone = connected(processes), processes[1].connect()
        await pool.update(new.specs(), new.chunks(), "new")
        assert new.pulled > 2
        held = await pool.checksums()
        assert held == await alone.checksums()
        drawn = await pool.generate([[1], [2], [3]], SamplingParams(max_tokens=2))
        assert {span.version for group in drawn for c in group for span in c.spans} == {"new"}
        with pytest.raises(ValueError, match="weight update refused, the engine is unchanged"):
            await pool.update(new.specs()[1:], new.chunks(), "less")
        assert await pool.checksums() == held
        await alone.update(other.specs(), other.chunks(), "other")
        with pytest.raises(RuntimeError, match="engine hf 1 on here has other weights than eng"):
            await pool.checksums()
        await pool.update(new.specs(), new.chunks(), "again")
        assert await pool.checksums() == held
        await pool.close()
        await alone.close()

    asyncio.run(push())


def test_a_sender_that_fails_breaks_every_engine_and_a_dead_one_is_named_at_once(
    processes: list[EngineProcess],
) -> None:
    """Last, since it leaves nothing behind that could draw."""
    new = Sender(weights(tiny_llama(1)))

    async def hurt() -> None:
        pool = connected(processes)
        alone = processes[1].connect()
        endless = asyncio.create_task(alone.generate([[1]], SamplingParams(max_tokens=500_000)))
        await asyncio.sleep(0.5)
        began = time.monotonic()
        os.kill(processes[1].pid, signal.SIGKILL)
        # Its threads may still be ending, so that its exit code is not known yet.
        ending = r"engine hf 1 on here \(pid \d+\) (was killed by SIGKILL|is gone)"
        with pytest.raises(EngineDied, match=ending):
            await endless
        assert time.monotonic() - began < 30
        drawn = await pool.generate([[1 + i] for i in range(6)], SamplingParams(max_tokens=2))
        assert [len(group) for group in drawn] == [1] * 6
        with pytest.raises(EngineDied, match="engine hf 1 on here"):
            await pool.health()
        elsewhere = replace(processes[1].address, home=("another machine", 0))
        with pytest.raises(
            EngineDied, match=r"engine hf 1 on here \(pid \d+\) is not reached from"
        ):
            await RemoteEngine(elsewhere).health()
        rest = connected(processes[:1])
        with pytest.raises(RuntimeError, match="the trainer fell over"):
            await rest.update(new.specs(), new.chunks(fail_after=1), "half")
        with pytest.raises(EngineError, match="half-way"):
            await rest.health()
        await rest.close()
        await alone.close()
        await pool.close()

    asyncio.run(hurt())
