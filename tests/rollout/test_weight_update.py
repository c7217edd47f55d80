"""The failures of an update after which the engine still works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from rollout_models import shared_chunk
from tensor_specs import spec

from ctrl_megatron.rollout.engine import EngineBroken, EngineError
from ctrl_megatron.rollout.weight_chunks import WeightChunk
from ctrl_megatron.rollout.weight_update import WeightState


class Steps:
    """Engine steps that record what happened."""

    def __init__(self, fail_at: str = "") -> None:
        self.log: list[str] = []
        self.fail_at = fail_at

    def note(self, what: str) -> None:
        self.log.append(what)
        if what == self.fail_at:
            raise OSError("disk on fire")

    async def begin_update(self) -> None:
        self.note("begin")

    async def load_chunk(self, chunk: WeightChunk) -> None:
        self.note(f"read {chunk['place']['segments'][0]}")

    async def commit_update(self, version: str) -> None:
        self.note(f"commit {version}")

    async def end_frozen_completions(self) -> None:
        self.note("fail")


MANIFEST = [spec("a"), spec("b")]


def run_update(state: WeightState, steps: Steps, chunks: list[WeightChunk | Exception]) -> None:
    async def produce() -> AsyncIterator[WeightChunk]:
        for number, chunk in enumerate(chunks):
            steps.note(f"pull {number}")
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def work() -> None:
        await state.replace_weights(steps, MANIFEST, produce(), "v1")

    asyncio.run(work())


A, B = (shared_chunk(name, [(spec(name), 0)]) for name in "ab")


def test_a_chunk_is_pulled_only_when_the_previous_one_was_read() -> None:
    steps, state = Steps(), WeightState(MANIFEST)
    run_update(state, steps, [A, B])
    assert steps.log == ["pull 0", "begin", "read a", "pull 1", "read b", "commit v1"]
    assert state.version == "v1"
    state.require_not_broken()


def test_an_engine_that_awaits_its_weights_generates_after_a_whole_update_only() -> None:
    state = WeightState(MANIFEST)
    state.mark_weights_missing()
    for _ in range(2):
        with pytest.raises(EngineError, match="has no weights yet; update them first"):
            state.require_ready()
        with pytest.raises(EngineError, match="did not start"):
            run_update(state, Steps(), [ValueError("no weights")])
    run_update(state, Steps(), [A, B])
    state.require_ready()
    state.mark_weights_missing()
    with pytest.raises(EngineBroken, match=r"v1.*failed half-way"):
        run_update(state, Steps("read b"), [A, B])
    with pytest.raises(EngineBroken):
        state.require_ready()


@pytest.mark.parametrize("first", [ValueError("no weights"), shared_chunk("a", [(spec("q"), 0)])])
def test_a_failure_before_anything_was_read_leaves_the_engine_whole(
    first: WeightChunk | Exception,
) -> None:
    steps, state = Steps(), WeightState(MANIFEST)
    with pytest.raises(EngineError, match="did not start"):
        run_update(state, steps, [first])
    assert steps.log == ["pull 0"] and state.version == "initial"
    state.require_not_broken()


@pytest.mark.parametrize(
    ("fail_at", "chunks"),
    [
        ("begin", [A, B]),
        ("read a", [A, B]),
        ("read b", [A, B]),
        ("commit v1", [A, B]),
        ("", [A]),
        ("", [A, A]),
        ("", [A, RuntimeError("trainer fell over")]),
    ],
)
def test_a_failure_after_that_breaks_it(
    fail_at: str, chunks: list[WeightChunk | Exception]
) -> None:
    steps, state = Steps(fail_at), WeightState(MANIFEST)
    with pytest.raises(EngineBroken, match=r"v1.*failed half-way"):
        run_update(state, steps, chunks)
    assert steps.log[-1] == "fail" and state.version == "initial"
    with pytest.raises(EngineBroken, match="launch the engine again"):
        state.require_not_broken()
    with pytest.raises(EngineBroken):
        run_update(state, Steps(), [A, B])
