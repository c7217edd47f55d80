"""Who holds the device: what engine and models are told, in which order, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ctrl_megatron.parallel.background import BackgroundLoop
from ctrl_megatron.resharding.device import DeviceOwner
from ctrl_megatron.resharding.engine_weights import EngineLink, EngineWeights
from ctrl_megatron.resharding.plan import TensorPlace
from ctrl_megatron.rollout.weight_chunks import WeightChunk
from ctrl_megatron.types import TensorSpec

ALL = ("weights", "gradients", "optimizer")


class OneRank:
    """``ProcessGroups`` of a single process, without torch.distributed; counts its meetings."""

    is_first_here = True

    def __init__(self) -> None:
        self.meetings = 0

    def barrier(self) -> None:
        self.meetings += 1

    def from_first_here(self, value: Any) -> Any:
        return value

    def on_any(self, *flags: bool) -> tuple[bool, ...]:
        self.meetings += 1
        return flags


@dataclass
class NotedModel:
    """A ``ParallelModel`` that writes down when something comes or goes."""

    name: str
    events: list[str]
    away: set[str] = field(default_factory=set)

    def take_device(self) -> None:
        raise AssertionError("not adopted")

    def offload(self, *parts: str) -> None:
        for part in set(parts) - self.away:
            self.away.add(part)
            self.events.append(f"{self.name} {part} leave")

    def onload(self, *parts: str) -> None:
        self.take_device()
        for part in set(parts) & self.away:
            self.away.remove(part)
            self.events.append(f"{self.name} {part} back")


class OneTensor:
    """A ``WeightSource`` of one tensor."""

    places = (
        TensorPlace(spec=TensorSpec(name="w", dtype="float32", shape=(4,)), bucket=0, offset=0),
    )

    def __init__(self, model: NotedModel | None) -> None:
        self.model = model

    def fill(self, bucket: int, memory: torch.Tensor) -> None:
        assert self.model is None or "weights" not in self.model.away
        memory.zero_()


class NotedEngine:
    """Writes down what it is asked for; refuses what a sleeping engine could not do."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.asleep = events, set[str]()

    async def update(
        self, specs: Sequence[TensorSpec], chunks: AsyncIterator[WeightChunk], version: str
    ) -> None:
        assert "weights" not in self.asleep
        async for _ in chunks:
            pass
        self.events.append(f"push {version}")

    async def sleep(self, level: int) -> None:
        assert not self.asleep
        self.asleep = {"weights", "kv_cache"}
        self.events.append(f"sleep {level}")

    async def wake(self, tags: Sequence[str]) -> None:
        self.asleep -= set(tags)
        self.events.append(f"wake {'+'.join(tags)}")


class Bench:
    """A trainer of two models and an engine; ``linked`` is off on ranks that drive no engine."""

    def __init__(
        self, loop: BackgroundLoop, *, leaves: Any = (), shared: bool = True, linked: bool = True
    ) -> None:
        self.events: list[str] = []
        self.groups, groups = OneRank(), Any
        groups = self.groups
        self.actor = NotedModel("actor", self.events)
        self.reference = NotedModel("reference", self.events)
        self.engine = NotedEngine(self.events)
        link = EngineLink(engine=self.engine, loop=loop) if linked else None  # type: ignore[arg-type]
        sources: Any = {"actor": OneTensor(self.actor), "proxy": OneTensor(None)}
        self.weights = EngineWeights(sources, link, groups, verify=False)  # type: ignore[arg-type]
        self.owner = DeviceOwner(link, groups, shared=shared, leaves=leaves)  # type: ignore[arg-type]
        if shared:
            self.owner.to_trainer()
        self.adopt(self.actor)
        self.adopt(self.reference)

    def adopt(self, model: Any) -> None:
        self.owner.adopt(model)

    def use(self, role: Any) -> str:
        return self.owner.to_engine(self.weights, role)

    def taken(self) -> list[str]:
        events = list(self.events)
        self.events.clear()
        return events


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[BackgroundLoop]:
    background = BackgroundLoop()
    yield background
    background.close()


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Emptied caches go among the events of the list that is put in here."""
    noted: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: noted[0].append("empty"))
    return noted


def test_a_step_with_everything_leaving(loop: BackgroundLoop, emptied: list[list[str]]) -> None:
    bench = Bench(loop, leaves=ALL)
    emptied.append(bench.events)
    assert bench.taken() == ["sleep 2"]
    assert bench.use("actor") == "actor@0"
    let_go = {f"actor {part} leave" for part in ALL} | {f"reference {p} leave" for p in ALL}
    events = bench.taken()
    push = events.index("push actor@0")
    assert events[push - 2 : push] == ["empty", "wake weights"]
    # The weights that are pushed stay until they are; only then the cache finds room.
    assert set(events[: push - 2]) == let_go - {"actor weights leave"}
    assert events[push + 1 :] == ["actor weights leave", "empty", "wake kv_cache"]
    # The proxy comes from files: nothing has to make room.
    assert bench.use("proxy") == "proxy" and bench.taken() == ["push proxy"]
    # Drawing again: the trainer's weights come back in the engine's place.
    bench.use("actor")
    assert bench.taken() == [
        *("sleep 2", "actor weights back", "empty", "wake weights", "push actor@0"),
        *("actor weights leave", "empty", "wake kv_cache"),
    ]
    bench.actor.onload("weights")
    assert bench.taken() == ["sleep 2", "actor weights back"]
    bench.actor.onload(*ALL)
    bench.reference.onload("weights")
    events = bench.taken()
    assert set(events) == {
        *("actor gradients back", "actor optimizer back", "reference weights back"),
    }


def test_weights_are_kept_in_sleep_only_if_they_are_needed_next(loop: BackgroundLoop) -> None:
    bench = Bench(loop)
    bench.owner.needed_next = lambda: bench.weights.version("actor")
    bench.use("actor")
    bench.taken()
    bench.owner.to_trainer()
    bench.owner.to_trainer()
    bench.use("actor")
    assert bench.taken() == ["sleep 1", "wake weights", "wake kv_cache"]
    bench.weights.actor_changed(1)
    bench.owner.to_trainer()
    bench.use("actor")
    assert bench.taken() == ["sleep 2", "wake weights", "push actor@1", "wake kv_cache"]
    bench.owner.needed_next = lambda: None
    bench.owner.to_trainer()
    assert bench.use("actor") == "actor@1"
    assert bench.taken() == ["sleep 2", "wake weights", "push actor@1", "wake kv_cache"]


def test_an_engine_with_memory_of_its_own_never_sleeps(loop: BackgroundLoop) -> None:
    bench = Bench(loop, shared=False, leaves=("gradients",))
    bench.use("actor")
    bench.actor.onload("gradients")
    bench.use("actor")
    assert bench.taken() == [
        *("actor gradients leave", "reference gradients leave", "push actor@0"),
        *("actor gradients back", "actor gradients leave"),
    ]


def test_what_would_collide_is_refused(loop: BackgroundLoop) -> None:
    bench = Bench(loop)
    bench.use("proxy")
    with pytest.raises(RuntimeError, match="built while the engine holds the device"):
        bench.adopt(NotedModel("late", bench.events))
    bench.owner.to_trainer()
    bench.adopt(NotedModel("in time", bench.events))

    def use_in_a_push(bucket: int, memory: torch.Tensor) -> None:
        bench.reference.onload("weights")

    bench.weights._sources["actor"].fill = use_in_a_push  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="used while weights go to the engine"):
        bench.use("actor")


def test_ranks_with_and_without_an_engine_meet_equally_often(
    loop: BackgroundLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one of them would wait for ever."""
    monkeypatch.setattr("ctrl_megatron.resharding.engine_weights.push", lambda *_, **__: None)
    counts = []
    for linked in (True, False):
        bench = Bench(loop, leaves=ALL, linked=linked)
        for role in ("actor", "proxy", "actor"):
            bench.use(role)
        bench.owner.to_trainer()
        bench.use("actor")
        counts.append(bench.groups.meetings)
    assert counts[0] == counts[1] > 0
