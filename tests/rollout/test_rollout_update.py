"""Which failures of an update leave the engine whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tensor_specs import spec

from ctrl_megatron.rollout.engine import (
    Chunk,
    EngineBroken,
    EngineError,
    Slot,
)
from ctrl_megatron.rollout.update import WeightState


class Steps:
    """Engine steps that record what happened."""

    def __init__(self, fail_at: str = "") -> None:
        self.log: list[str] = []
        self.fail_at = fail_at

    def note(self, what: str) -> None:
        self.log.append(what)
        if what == self.fail_at:
            raise OSError("disk on fire")

    async def begin(self) -> None:
        self.note("begin")

    async def read(self, chunk: Chunk) -> None:
        self.note(f"read {chunk.segment}")

    async def commit(self, version: str) -> None:
        self.note(f"commit {version}")

    async def fail(self) -> None:
        self.note("fail")


MANIFEST = [spec("a"), spec("b")]


def run_update(state: WeightState, steps: Steps, chunks: list[Chunk | Exception]) -> None:
    async def produce() -> AsyncIterator[Chunk]:
        for number, chunk in enumerate(chunks):
            steps.note(f"pull {number}")
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def work() -> None:
        await state.replace(
            MANIFEST,
            produce(),
            "v1",
            begin=steps.begin,
            read=steps.read,
            commit=steps.commit,
            fail=steps.fail,
        )

    asyncio.run(work())


A, B = (Chunk(name, (Slot(spec(name), 0),)) for name in "ab")


def test_a_chunk_is_pulled_only_when_the_previous_one_was_read() -> None:
    steps, state = Steps(), WeightState(MANIFEST, "v0")
    run_update(state, steps, [A, B])
    assert steps.log == ["pull 0", "begin", "read a", "pull 1", "read b", "commit v1"]
    assert state.version == "v1"
    state.require_whole()


@pytest.mark.parametrize(
    "first", [ValueError("no weights"), B.__class__("a", (Slot(spec("q"), 0),))]
)
def test_a_failure_before_anything_was_read_leaves_the_engine_whole(
    first: Chunk | Exception,
) -> None:
    steps, state = Steps(), WeightState(MANIFEST, "v0")
    with pytest.raises(EngineError, match="did not start"):
        run_update(state, steps, [first])
    assert steps.log == ["pull 0"] and state.version == "v0"
    state.require_whole()


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
def test_a_failure_after_that_breaks_it(fail_at: str, chunks: list[Chunk | Exception]) -> None:
    steps, state = Steps(fail_at), WeightState(MANIFEST, "v0")
    with pytest.raises(EngineBroken, match=r"v1.*failed half-way"):
        run_update(state, steps, chunks)
    assert steps.log[-1] == "fail" and state.version == "v0"
    with pytest.raises(EngineBroken, match="launch the engine again"):
        state.require_whole()
    with pytest.raises(EngineBroken):
        run_update(state, Steps(), [A, B])
