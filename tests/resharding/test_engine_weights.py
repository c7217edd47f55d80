"""The engine that two models share: what it is told, in which order, and when it sleeps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctrl_megatron.parallel.background import BackgroundLoop
from ctrl_megatron.resharding.engine_weights import EngineLink, EngineWeights
from ctrl_megatron.resharding.plan import TensorPlace
from ctrl_megatron.rollout.weight_chunks import WeightChunk
from ctrl_megatron.types import TensorSpec


class OneRank:
    """``ProcessGroups`` of a single process, without torch.distributed."""

    is_first, is_first_here, rank = True, True, 0
    layout = SimpleNamespace(world_size=1)

    def __init__(self) -> None:
        self.barriers = 0

    def barrier(self) -> None:
        self.barriers += 1

    def from_first_here(self, value: Any) -> Any:
        return value


class OneTensor:
    """A ``WeightSource`` of one tensor."""

    places = (
        TensorPlace(spec=TensorSpec(name="w", dtype="float32", shape=(4,)), bucket=0, offset=0),
    )

    def fill(self, bucket: int, memory: torch.Tensor) -> None:
        memory.zero_()


class NotedEngine:
    """Writes down what it is asked for; refuses what a sleeping engine could not do."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asleep: set[str] = set()

    async def update(
        self, specs: Sequence[TensorSpec], chunks: AsyncIterator[WeightChunk], version: str
    ) -> None:
        assert "weights" not in self.asleep
        async for _ in chunks:
            pass
        self.calls.append(f"update {version}")

    async def sleep(self, tags: Sequence[str]) -> None:
        assert not self.asleep, "an engine falls asleep as a whole"
        self.asleep = set(tags)
        self.calls.append(f"sleep {'+'.join(tags)}")

    async def wake(self, tags: Sequence[str]) -> None:
        self.asleep -= set(tags)
        self.calls.append(f"wake {'+'.join(tags)}")

    def generate(self) -> None:
        assert not self.asleep
        self.calls.append("generate")


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    background = BackgroundLoop()
    yield background
    background.close()


def switch(
    engine: NotedEngine | None, loop: BackgroundLoop, groups: OneRank, *, may_sleep: bool
) -> EngineWeights:
    link = EngineLink(engine=engine, loop=loop) if engine else None  # type: ignore[arg-type]
    sources = {"actor": OneTensor(), "proxy": OneTensor()}
    return EngineWeights(
        sources,  # type: ignore[arg-type]
        link,
        groups,  # type: ignore[arg-type]
        verify=False,
        may_sleep=may_sleep,
    )


def one_step(weights: EngineWeights, engine: NotedEngine, step: int) -> None:
    """As the nodes do it."""
    for role in ("actor", "proxy"):
        weights.use(role)
        engine.generate()
    weights.rest()
    weights.actor_changed(step)
    weights.load("actor")


def test_the_engine_sleeps_from_the_last_revision_to_the_next_push(loop: BackgroundLoop) -> None:
    engine = NotedEngine()
    weights = switch(engine, loop, OneRank(), may_sleep=True)
    one_step(weights, engine, 1)
    first = ["update actor@0", "generate", "update proxy", "generate", "sleep weights+kv_cache"]
    assert engine.calls == [*first, "wake weights", "update actor@1"]
    engine.calls.clear()
    one_step(weights, engine, 2)
    assert engine.calls == [
        *("wake kv_cache", "generate", "update proxy", "generate", "sleep weights+kv_cache"),
        *("wake weights", "update actor@2"),
    ]
    assert engine.asleep == {"kv_cache"}


def test_weights_that_are_there_already_are_woken_and_not_sent_again(loop: BackgroundLoop) -> None:
    engine = NotedEngine()
    weights = switch(engine, loop, OneRank(), may_sleep=True)
    weights.use("proxy")
    weights.rest()
    weights.rest()
    weights.use("proxy")
    engine.generate()
    assert engine.calls == [
        *("update proxy", "sleep weights+kv_cache", "wake weights", "wake kv_cache", "generate")
    ]
    weights.rest()
    weights.load("proxy")
    weights.rest()
    assert engine.asleep == {"weights", "kv_cache"}


def test_an_engine_that_may_not_sleep_is_never_asked_to(loop: BackgroundLoop) -> None:
    engine, groups = NotedEngine(), OneRank()
    weights = switch(engine, loop, groups, may_sleep=False)
    weights.use("proxy")
    before = groups.barriers
    weights.rest()
    weights.use("proxy")
    assert engine.calls == ["update proxy"]
    assert groups.barriers == before


def test_ranks_with_and_without_the_engine_meet_equally_often(
    loop: BackgroundLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one of them would wait for ever."""
    monkeypatch.setattr("ctrl_megatron.resharding.engine_weights.push", lambda *_, **__: None)
    counts = []
    for engine in (NotedEngine(), None):
        groups = OneRank()
        weights = switch(engine, loop, groups, may_sleep=True)
        one_step(weights, NotedEngine(), 1)
        weights.use("actor")
        weights.rest()
        counts.append(groups.barriers)
    assert counts[0] == counts[1] > 0
