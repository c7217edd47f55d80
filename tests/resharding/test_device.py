"""The owner of the device: the order of calls to engine and models, and the refused calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from test_plan import model

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.errors import ServiceLost
from ctrl_megatron.parallel.hosts import Hosts
from ctrl_megatron.parallel.layout import Layout
from ctrl_megatron.parallel.stop import StopFlag
from ctrl_megatron.parallel.waiting import WaitRules
from ctrl_megatron.resharding import device as device_file
from ctrl_megatron.resharding.device import DeviceOwner
from ctrl_megatron.resharding.plan import EngineLayout, Rectangle, hf_specs
from ctrl_megatron.resharding.proof import PushProof
from ctrl_megatron.resharding.push import PushReport
from ctrl_megatron.resharding.transports.shared_memory import SharedMemorySender
from ctrl_megatron.rollout.engine import EngineDied
from ctrl_megatron.rollout.weight_chunks import WeightChunk
from ctrl_megatron.rollout.weight_update import tensor_checksum
from ctrl_megatron.types import TensorSpec

ALL = ("weights", "gradients", "optimizer")


class OneRank:
    """``ProcessGroups`` of a single process, without torch.distributed; counts its meetings."""

    is_first_of_host, rank, size = True, 0, 1
    host_index, hosts = 0, Hosts(names=("here",), of_rank=(0,))

    def __init__(self) -> None:
        self.meetings = 0

    def barrier(self) -> None:
        self.meetings += 1

    def broadcast_from_host_first(self, value: Any) -> Any:
        return value

    def gather_from_host(self, value: Any) -> dict[int, Any]:
        return {0: value}

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def any_rank(self, *flags: bool) -> tuple[bool, ...]:
        self.meetings += 1
        return flags


@dataclass
class NotedModel:
    """A ``ParallelModel`` that writes down when something comes or goes."""

    name: str
    events: list[str]
    take_device: Callable[[], None]
    offloaded_parts: set[str] = field(default_factory=set)
    update_count: int = 0

    def offload(self, *parts: str) -> None:
        for part in set(parts) - self.offloaded_parts:
            self.offloaded_parts.add(part)
            self.events.append(f"{self.name} {part} leave")

    def onload(self, *parts: str) -> None:
        self.take_device()
        for part in set(parts) & self.offloaded_parts:
            self.offloaded_parts.remove(part)
            self.events.append(f"{self.name} {part} back")


class Zeros:
    """A ``WeightSource`` of zeros in one bucket."""

    engine_layout = EngineLayout(dtype="float32", bucket_bytes=1 << 20)
    shape, trainer_layout, te_names, kept = model(hidden=64, layers=1), Layout(), False, False
    specs = hf_specs(shape, "float32")

    def __init__(self, model: NotedModel | None) -> None:
        self.model = model

    def values(self, chunk: int, rectangle: Rectangle) -> torch.Tensor:
        assert self.model is None or "weights" not in self.model.offloaded_parts
        return torch.zeros(rectangle.piece.extent)


class NotedEngine:
    """Records its calls; refuses those that a sleeping engine could not execute."""

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
        self,
        loop: BackgroundLoop,
        *,
        offloaded_parts: Any = (),
        shared: bool = True,
        linked: bool = True,
        critic_warmup: int = 0,
        engine: Any = None,
        restarts: Any = None,
        mode: Any = "false",
        beside: Bench | None = None,
    ) -> None:
        self.events: list[str] = beside.events if beside else []
        self.groups, groups = OneRank(), Any
        groups = self.groups
        self.engine = engine or NotedEngine(self.events)
        self.owner = DeviceOwner(
            self.engine if linked else None,
            loop,
            SharedMemorySender(groups),  # type: ignore[arg-type]
            EngineLayout(dtype="float32", bucket_bytes=64),
            WaitRules(groups=self.groups, stop=StopFlag(), limit=60.0),  # type: ignore[arg-type]
            directories={"proxy": "proxy's"},
            shared=shared,
            offloaded_parts=offloaded_parts,
            learns=lambda step: step >= critic_warmup,
            proof=PushProof(mode, groups, probe=()),
            restarts=restarts,
            beside=beside and beside.owner,
        )
        if beside is not None:
            return
        self.actor, self.reference = self.model("actor"), self.model("reference")
        self.owner.register_policy(self.actor, "actor")
        self.owner.register_model(self.reference)

    def model(self, name: str) -> Any:
        return NotedModel(name, self.events, self.owner.free_for_trainer)

    def use(self, role: Any, step: int = 0) -> str:
        return self.owner.to_engine(role, step)

    def taken(self) -> list[str]:
        events = list(self.events)
        self.events.clear()
        return events


@pytest.fixture(autouse=True)
def one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and directories have one tensor."""
    monkeypatch.setattr(device_file, "ModelSource", lambda model, layout: Zeros(model))
    monkeypatch.setattr(device_file, "DirectorySource", lambda *_, **__: Zeros(None))


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
    bench = Bench(loop, offloaded_parts=ALL)
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
    bench = Bench(loop, critic_warmup=2)
    bench.use("actor", 0)
    bench.taken()
    bench.owner.free_for_trainer()
    bench.owner.free_for_trainer()
    bench.use("actor", 1)
    assert bench.taken() == ["sleep 1", "wake weights", "wake kv_cache"]
    bench.use("proxy", 1)
    bench.owner.free_for_trainer()
    assert bench.taken() == ["push proxy", "sleep 2"]
    # From the second step on the actor learns.
    assert bench.use("actor", 2) == "actor@0"
    bench.owner.free_for_trainer()
    assert bench.use("actor", 2) == "actor@0"
    assert bench.taken() == [
        *("wake weights", "push actor@0", "wake kv_cache", "sleep 2"),
        *("wake weights", "push actor@0", "wake kv_cache"),
    ]


def test_weights_have_a_new_version_whenever_they_have_changed(loop: BackgroundLoop) -> None:
    bench = Bench(loop, shared=False)
    # Resumed after four steps.
    assert bench.use("actor", 4) == bench.use("actor", 4) == "actor@4"
    bench.actor.update_count = 3
    assert bench.use("actor", 5) == "actor@5" and bench.use("proxy", 5) == "proxy"
    # A step without an update of the actor, then two updates within a step.
    assert bench.use("actor", 6) == "actor@5"
    for updates, version in ((4, "actor@6"), (5, "actor@7"), (5, "actor@7")):
        bench.actor.update_count = updates
        assert bench.use("actor", 6) == version
    pushed = ["push actor@4", "push actor@5", "push proxy", "push actor@5"]
    assert bench.taken() == [*pushed, "push actor@6", "push actor@7"]
    assert len(bench.owner.pop_push_reports()) == 6 and bench.owner.pop_push_reports() == []


class CalledEngine(NotedEngine):
    """A ``NotedEngine`` whose events begin with its name."""

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__(events)
        self.events = Named(name, events)  # type: ignore[assignment]


class Named:
    """Appends to a list what its name comes before."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def append(self, event: str) -> None:
        self.events.append(f"{self.name}: {event}")


def test_engines_of_two_policies_are_awake_in_turn(loop: BackgroundLoop) -> None:
    first = Bench(loop, offloaded_parts=("weights",))
    engine = CalledEngine("second", first.events)
    second = Bench(loop, offloaded_parts=("weights",), engine=engine, beside=first)
    solver = second.model("solver")
    second.owner.register_policy(solver, "agent1")
    first.taken()
    assert first.use("actor") == "actor@0"
    first.taken()
    # The first one's weights are needed again in the step, so they stay in host memory.
    assert second.use("agent1") == "agent1@0"
    assert first.taken() == [
        *("sleep 1", "solver weights back", "second: wake weights", "second: push agent1@0"),
        *("solver weights leave", "second: wake kv_cache"),
    ]
    assert first.use("actor") == "actor@0"
    assert first.taken() == ["second: sleep 1", "wake weights", "wake kv_cache"]
    # Any model that computes sends all engines to sleep, and those that draw send all models away.
    solver.onload("weights")
    assert first.taken() == ["sleep 2", "solver weights back"]
    solver.update_count = 1
    assert second.use("agent1", 1) == "agent1@1"
    assert first.taken() == [
        *("second: wake weights", "second: push agent1@1", "solver weights leave"),
        "second: wake kv_cache",
    ]
    assert first.owner.pushed == second.owner.pushed == {"actor": 0, "agent1": 1}
    assert len(second.owner.pop_push_reports()) == 3 and first.owner.pop_push_reports() == []


def test_two_policies_learn_and_take_turns_on_the_engines(loop: BackgroundLoop) -> None:
    bench = Bench(loop)
    second = bench.model("second")
    bench.owner.register_policy(second, "agent1")
    assert bench.use("agent1", 2) == "agent1@2" and bench.use("actor", 2) == "actor@2"
    bench.owner.free_for_trainer()
    # Only the second one's weights change, so only it gets another name.
    second.update_count = 1
    assert bench.use("actor", 3) == "actor@2" and bench.use("agent1", 3) == "agent1@3"
    assert [event for event in bench.taken() if event.startswith("push")] == [
        *("push agent1@2", "push actor@2", "push actor@2", "push agent1@3")
    ]
    assert bench.owner.pushed == {"agent1": 3, "actor": 2}


def test_another_directory_of_a_role_is_pushed(loop: BackgroundLoop) -> None:
    bench = Bench(loop, shared=False)
    bench.use("proxy")
    bench.owner.set_directory("proxy", "another")
    bench.use("proxy")
    bench.use("proxy")
    assert bench.taken() == ["push proxy", "push proxy"]


def test_an_engine_with_memory_of_its_own_never_sleeps(loop: BackgroundLoop) -> None:
    bench = Bench(loop, shared=False, offloaded_parts=("gradients",))
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
    with pytest.raises(RuntimeError, match="built while the engine has the device"):
        bench.owner.register_model(bench.model("late"))
    bench.owner.free_for_trainer()
    bench.owner.register_model(bench.model("in time"))

    def use_in_a_push(chunk: int, rectangle: Rectangle) -> torch.Tensor:
        bench.reference.onload("weights")
        raise AssertionError("the model was used")

    bench.owner._sources["actor"].values = use_in_a_push  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="used while weights go to the engine"):
        bench.use("actor")


def test_ranks_with_and_without_an_engine_meet_equally_often(
    loop: BackgroundLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one of them would wait for ever."""
    report = PushReport(num_bytes=0, seconds=0.0)
    monkeypatch.setattr("ctrl_megatron.resharding.device.push", lambda *_, **__: report)
    counts = []
    for linked in (True, False):
        bench = Bench(loop, offloaded_parts=ALL, linked=linked)
        for role in ("actor", "proxy", "actor"):
            bench.use(role)
        bench.owner.free_for_trainer()
        bench.use("actor")
        counts.append(bench.groups.meetings)
    assert counts[0] == counts[1] > 0


class MortalEngine(NotedEngine):
    """Dies in its call number ``dies_at``, and is its own ``EngineKeeper``."""

    def __init__(self, dies_at: int) -> None:
        super().__init__([])
        self.dies_at, self.calls, self.restarts, self.dead = dies_at, 0, 0, False
        self.held: str | None = None

    def _lives(self) -> None:
        self.calls += 1
        if self.calls == self.dies_at:
            self.dead, self.held = True, None
        if self.dead:
            raise EngineDied("engine mortal (pid 7) died")

    async def update(self, specs: Any, chunks: Any, version: str) -> None:
        self._lives()
        await super().update(specs, chunks, version)
        self.held = version

    async def sleep(self, level: int) -> None:
        self._lives()
        await super().sleep(level)
        self.held = self.held if level == 1 else None

    async def wake(self, tags: Sequence[str]) -> None:
        self._lives()
        assert self.asleep.issuperset(tags)
        await super().wake(tags)

    async def checksums(self) -> dict[str, str]:
        self._lives()
        return {s.name: tensor_checksum(torch.zeros(s.shape)) for s in Zeros.specs}

    def needs_restore(self) -> bool:
        return False  # it has not been noticed yet, which is the harder case

    async def restore(self, asleep: set[str]) -> int:
        died, self.dead = self.dead, False
        self.restarts += died
        if died:
            self.asleep = set(asleep)
        return int(died)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("offloaded_parts", [(), ALL])
def test_an_engine_that_dies_in_any_call_is_restored_with_the_right_weights(
    loop: BackgroundLoop, shared: bool, offloaded_parts: tuple[str, ...]
) -> None:
    deaths = 0
    for dies_at in range(2, 20):
        engine = MortalEngine(dies_at)
        bench = Bench(
            loop,
            **{"shared": shared, "offloaded_parts": offloaded_parts},
            **{"engine": engine, "restarts": engine, "mode": "first"},
        )
        for step in range(2):
            bench.actor.update_count = step
            for role, version in (("actor", f"actor@{step}"), ("proxy", "proxy")):
                assert bench.use(role, step) == engine.held == version
                assert not engine.asleep and not engine.dead
            bench.actor.onload(*ALL)
        deaths += engine.restarts
    assert deaths >= 3


def test_without_restarts_and_where_they_do_not_help_the_loss_is_raised(
    loop: BackgroundLoop,
) -> None:
    mortal = MortalEngine(2)
    bench = Bench(loop, shared=False, engine=mortal)
    bench.use("actor")
    with pytest.raises(ServiceLost, match=r"engine mortal \(pid 7\) died"):
        bench.use("proxy")
    # It answers that it is lost, whatever is done.
    hopeless = MortalEngine(1)
    hopeless.restore = lambda asleep: asyncio.sleep(0, 0)  # type: ignore[method-assign]
    with pytest.raises(ServiceLost, match="engine mortal"):
        Bench(loop, shared=False, engine=hopeless, restarts=hopeless).use("actor")
    assert hopeless.calls == 4
