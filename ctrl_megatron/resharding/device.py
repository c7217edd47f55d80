"""Who has the device, engine or trainer, and which weights the engines have.

Where both use the same devices there are two states and one way in each direction:

    trainer ── to_engine ──► engine      gradients and optimizer leave; caches are emptied; the
                                         engine's weights wake; the push, where other weights are
                                         needed; the trainer's weights leave; caches are emptied;
                                         the engine's key-value cache wakes
    engine ── free_for_trainer ──► trainer
                                         the engine sleeps as a whole; what the trainer needs comes
                                         back when it is needed

A run begins with the engine alone. It sleeps before the first model is built. Every pass, step,
export and load of a model calls ``free_for_trainer``. A save needs no device: it reads what is away
from host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.errors import ServiceLost
from ctrl_megatron.models.parallel_model import OffloadPart, ParallelModel
from ctrl_megatron.models.policy import Policy
from ctrl_megatron.models.shape import AnyShape
from ctrl_megatron.parallel.waiting import WaitRules
from ctrl_megatron.resharding.plan import EngineLayout
from ctrl_megatron.resharding.proof import PushProof
from ctrl_megatron.resharding.push import PushReport, push
from ctrl_megatron.resharding.sources import (
    DirectorySource,
    ModelSource,
    WeightSource,
    ZeroAdapters,
)
from ctrl_megatron.resharding.transports import Sender
from ctrl_megatron.rollout.engine import ENGINE_MEMORY, Engine, EngineMemory
from ctrl_megatron.types import StrategyName

Role = str
"""Whose weights: ``actor``, ``agent1``, ``agent2``, ... of policies that learn, or ``proxy``."""


def policy_role(number: int) -> Role:
    """The role of the policy with that ``agent_group``."""
    return f"agent{number}" if number else "actor"


_MOST_LOSSES = 3
"""Losses in a step without an engine that was started again, after which the run ends."""


class EngineRestarter(Protocol):
    """Starts this host's engines again, on its first rank; elsewhere there are none."""

    def needs_restore(self) -> bool:
        """Whether an engine is lost, or was started again and is not restored yet."""
        ...

    async def restore(self, asleep: Collection[EngineMemory]) -> int:
        """Return when all engines run; the number of those that were started again since the last
        call. These have no weights, and of their memory ``asleep`` sleeps."""
        ...


class ActorVersions:
    """Names of the weights of a policy that learns: ``actor@N`` after N training steps, a new one
    only where the weights have changed.
    """

    def __init__(self, role: Role = "actor") -> None:
        self._role = role
        self._numbers: list[int] = []
        """N of every name so far."""
        self._updates = 0
        """Updates of the actor's model that led to the last one."""

    def name(self, updates: int, step: int) -> str:
        """The name of the weights after so many ``updates`` of the model, in training step number
        ``step``.
        """
        if not self._numbers:
            self._numbers.append(step)
        elif self._updates != updates:
            self._numbers.append(max(step, self._numbers[-1] + 1))
        self._updates = updates
        return f"{self._role}@{self._numbers[-1]}"

    def versions_behind(self, version: str) -> int:
        """How many names are newer than ``version``, which is the number of updates since.
        ValueError if ``version`` is newer than the last name."""
        number = int(version.removeprefix(f"{self._role}@"))
        if not self._numbers or number > self._numbers[-1]:
            raise ValueError(f"no weights were called {version} until now")
        return sum(number < newer for newer in self._numbers)

    def last_step_numbers(self, count: int) -> list[int]:
        """The step numbers N of the last ``count`` names ``actor@N``, ascending."""
        return self._numbers[-count:]

    def restore_names(self, numbers: Sequence[int], updates: int) -> None:
        """Take over the names of an earlier run; ``updates`` are the model's now."""
        self._numbers, self._updates = list(numbers), updates


class VersionsByRole(dict[Role, ActorVersions]):
    """The names of the weights of every policy that learns."""

    def __missing__(self, role: Role) -> ActorVersions:
        self[role] = ActorVersions(role)
        return self[role]


class DeviceOwner:
    """Hands the devices of all ranks over between trainer and engines, and pushes to the engines
    the weights that they lack. All ranks call the same methods in the same order.

    The engines generate for all roles in turn; every completion names the weights that drew it.
    Policies with engines of their own have an owner each, of whose engines one group is awake at a
    time where they share devices.

    An engine that is lost, whenever that is, is restored by the next ``to_engine``: all ranks wait
    for its restart, and all engines get the weights anew.
    """

    def __init__(
        self,
        engine: Engine | None,
        loop: BackgroundLoop,
        sender: Sender,
        layout: EngineLayout,
        waiting: WaitRules,
        *,
        directories: Mapping[Role, str | Path],
        strategy: StrategyName = "megatron",
        shared: bool = False,
        offloaded_parts: Sequence[OffloadPart] = (),
        learns: Callable[[int], bool] = lambda step: True,
        adapter_shape: AnyShape | None = None,
        keep_proxy: bool = False,
        proof: PushProof | None = None,
        restarts: EngineRestarter | None = None,
        beside: DeviceOwner | None = None,
    ) -> None:
        """``engine`` is a client of this host's engines on its first rank, None elsewhere.

        ``directories`` are the HF directories of the roles that no model of the trainer plays, and
        ``strategy`` says which models may be there.
        With ``shared`` trainer and engines use the same devices, and the engines sleep from now on;
        without it they never sleep. ``offloaded_parts`` are the parts of a model that go to host
        memory while the engines generate. ``learns`` says whether the policy learns in the step
        before which so many are finished.
        ``adapter_shape`` is the shape of the actor if only LoRA adapters are sent. The engines then
        keep their base weights, also asleep, and the directories' roles use these. With
        ``keep_proxy`` the weights of the proxy's directory are read and sent once, and stay in the
        hosts' memory. ``proof`` says which pushes are verified; None verifies those after a loss.
        Without ``restarts`` a lost engine is an error. ``beside`` is the owner of the devices for
        the engines of another policy.
        """
        self._engine, self._loop, self._sender = engine, loop, sender
        self._groups, self._layout = sender.groups, layout
        self._proof = proof or PushProof("false", sender.groups, probe=())
        self._waiting = waiting
        self._adapter_shape, self._keep_proxy = adapter_shape, keep_proxy
        self._strategy: StrategyName = strategy
        self._shared, self._offloaded_parts, self._learns = shared, offloaded_parts, learns
        self._restarts, self._suspect, self._losses = restarts, False, 0
        self._loaded: str | None = None
        """The version that the engines have; None for weights that no push of ours has named."""
        self._models: list[tuple[ParallelModel, Sequence[OffloadPart]]] = []
        """Every model on the devices, and its parts that go to host memory; the same list for all
        owners, and so are their versions."""
        self.versions = VersionsByRole()
        self.pushed: dict[Role, int] = {}
        """N of the weights of each policy that were pushed last."""
        self._owners: list[DeviceOwner] = []
        """The owners for all engines on the devices, this one among them."""
        self._reports: list[PushReport] = []
        if beside is not None:
            self._models, self._owners = beside._models, beside._owners
            self.versions, self.pushed = beside.versions, beside.pushed
            self._reports = beside._reports
        self._owners.append(self)
        self._sources: dict[Role, WeightSource] = {}
        self._policies: dict[Role, Policy] = {}
        for role, directory in directories.items():
            self.set_directory(role, directory)
        self._asleep = set[EngineMemory]()
        self._handing_over = False
        self._step = 0
        """The training step of the last ``to_engine``."""
        self.free_for_trainer()

    def register_policy(self, policy: Policy, role: Role) -> None:
        """``register_model``, and push the weights of ``policy`` for ``role``."""
        self.register_model(policy)
        self._sources[role], self._policies[role] = ModelSource(policy, self._layout), policy

    def register_model(self, model: ParallelModel) -> None:
        """Share the device with ``model``, which has just been built and calls ``free_for_trainer``
        before it is used.

        RuntimeError if the engine was awake meanwhile.
        """
        if any(one._shared and one._asleep != set(ENGINE_MEMORY) for one in self._owners):
            raise RuntimeError(
                "a model was built while the engine has the device; call free_for_trainer() before"
            )
        self._models.append((model, self._offloaded_parts))

    def set_directory(self, role: Role, directory: str | Path) -> None:
        """Push the weights of an HF directory for ``role`` from now on."""
        self._policies.pop(role, None)
        self._sources[role] = (
            DirectorySource(
                directory,
                self._layout,
                self._groups,
                strategy=self._strategy,
                kept=self._keep_proxy and role == "proxy",
            )
            if self._adapter_shape is None
            else ZeroAdapters(self._adapter_shape, self._layout, self._groups)
        )
        self._loaded = None
        self._proof.forget(role)

    def free_for_trainer(self) -> None:
        """Let the engines sleep that are awake and share the device. Collective. Loads no model
        back: each is loaded when it is used.

        Their weights are copied to host memory only if the next completion needs the same ones;
        else they are dropped, since a push comes before the next completion. Engines with adapters
        keep what they have.
        """
        for owner in self._owners:
            same = not owner._learns(owner._step) and owner._loaded not in (None, "proxy")
            owner._free(keep=same or owner._adapter_shape is not None)

    def _free(self, *, keep: bool) -> None:
        """Let these engines sleep, with their weights in host memory or without. Collective."""
        if self._handing_over:
            raise RuntimeError(
                "a model was used while weights go to the engine; do that before or after"
            )
        if not self._shared or self._asleep == set(ENGINE_MEMORY):
            return
        if self._asleep:
            # A push failed half-way: the run is about to end.
            raise RuntimeError(f"the engine sleeps only in part ({', '.join(self._asleep)})")
        # Another leader may still be generating, and no rank may use the memory before it is free.
        self._groups.barrier()
        sleep = self._engine.sleep(level=1 if keep else 2) if self._engine else None
        if not keep:
            self._loaded = None
        self._asleep = set(ENGINE_MEMORY)
        try:
            self._waiting.wait_together(
                self._loop.submit(sleep) if sleep else None, "the engines to free the device"
            )
        except ServiceLost as lost:
            # One that is lost has freed it too.
            self._mark_lost(lost)

    def to_engine(self, role: Role, step: int) -> str:
        """Let the engine generate with the role's weights; returns their version. Collective.

        The version is ``proxy``, or ``actor@N``, ``agent1@N``, ... for the weights of a policy that
        learns after N training steps.
        ``step`` is the number of training steps that are finished.
        """
        if step != self._step:
            self._losses = 0
        while True:
            for other in self._owners if self._shared else ():
                if other is not self:
                    # It may draw again in this step, from the same weights.
                    other._free(keep=True)
            # An engine that starts again needs the memory too.
            if self._restore():
                self._proof.forget()
            try:
                version, self._step = self.version(role, step), step
                report, seconds = None, 0.0
                if self._loaded != version:
                    seconds = self._begin_probe(role)
                    self._make_room(self._sources[role].model)
                    # After a push that fails half-way the engine's weights have no version.
                    self._loaded = None
                    report = push(
                        self._sources[role],
                        self._engine,
                        self._loop,
                        self._sender,
                        self._waiting,
                        version=version,
                        verify=self._proof.compares_checksums,
                    )
                    self._loaded = version
                    if role != "proxy":
                        self.pushed[role] = int(version.removeprefix(f"{role}@"))
                self._handing_over = True
                self._offload_models()
                self._wake_all()
                self._handing_over = False
                if report is not None:
                    seconds += report.seconds + self._end_probe(role, version)
                    self._reports.append(replace(report, seconds=seconds))
                return version
            except ServiceLost as lost:
                self._mark_lost(lost)

    def _begin_probe(self, role: Role) -> float:
        """Compute what the engines should say after the next push for ``role``, where that is
        probed; the seconds that took. Collective."""
        began, policy = time.monotonic(), self._policies.get(role)
        if policy is not None and self._proof.needs_probe(role):
            if self._asleep != set(ENGINE_MEMORY):
                # A push was lost after its weights had left.
                self._wake_all()
            self._proof.begin_probe(role, policy)
        return time.monotonic() - began

    def _end_probe(self, role: Role, version: str) -> float:
        """Compare what the engines, which are awake, say after the push; the seconds that took.
        Collective."""
        began, held = time.monotonic(), None
        if self._proof.is_probing(role):
            tokens, engine = self._proof.probe, self._engine
            asked = self._loop.submit(engine.token_log_probs(tokens)) if engine else None
            held = self._waiting.wait_together(asked, f"the engines' log-probs of {version}")
        self._proof.end_push(role, version, held or ())
        return time.monotonic() - began

    def _make_room(self, sent: ParallelModel | None) -> None:
        """Let the engines' weights have the device, beside those of ``sent``. Collective."""
        if sent is not None and "weights" in sent.offloaded_parts:
            # They return to the memory of the engine's weights, which the push overwrites.
            if self._asleep != set(ENGINE_MEMORY):
                # A push was lost after its weights had left.
                self._wake_all()
            self.free_for_trainer()
            sent.onload("weights")
        self._handing_over = True
        self._offload_models(but=sent)
        self._wake("weights")

    def mark_lost(self, lost: ServiceLost) -> None:
        """An engine, of whatever policy, is lost: the next ``to_engine`` restores it. Collective.
        Raises ServiceLost where engines are not started again, or where that has not helped."""
        for owner in self._owners:
            owner._mark_lost(lost)

    def _mark_lost(self, lost: ServiceLost) -> None:
        if self._restarts is None or self._losses == _MOST_LOSSES:
            raise lost
        self._losses += 1
        self._suspect, self._loaded, self._handing_over = True, None, False

    def _restore(self) -> bool:
        """Whether an engine was lost; all run again. Collective."""
        if self._restarts is None:
            return False
        (lost,) = self._groups.any_rank(self._suspect or self._restarts.needs_restore())
        if not lost:
            return False
        self._offload_models()
        # An engine takes its memory when it starts.
        torch.cuda.empty_cache()
        self._groups.barrier()
        # Also where this host has only workers of an engine that another one serves.
        restored = self._loop.submit(self._restarts.restore(self._asleep))
        count = self._waiting.wait_together(restored, "the engines to start again")
        if any(self._groups.any_rank(bool(count))):
            self._losses = 0
        self._suspect, self._loaded = False, None
        return True

    def _wake_all(self) -> None:
        for memory in ENGINE_MEMORY:
            self._wake(memory)

    def pop_push_reports(self) -> list[PushReport]:
        """The reports of the pushes since the last call."""
        reports = self._reports.copy()
        self._reports.clear()
        return reports

    def close(self) -> None:
        for owner in self._owners:
            if owner._engine:
                owner._loop.run_before_close(owner._engine.close())

    def version(self, role: Role, step: int) -> str:
        """The name of the role's weights as they are now: a new one whenever they have changed.
        ``step`` as in ``to_engine``.
        """
        return role if role == "proxy" else self.versions[role].name(self.update_count(role), step)

    def update_count(self, role: Role) -> int:
        """How often the role's model was updated, those before a resume included; 0 for a role
        without a model."""
        model = self._sources[role].model
        return 0 if model is None else model.update_count

    def _offload_models(self, but: ParallelModel | None = None) -> None:
        for model, parts in self._models:
            stays = "weights" if model is but else None
            for part in parts:
                if part != stays:
                    model.offload(part)

    def _wake(self, memory: EngineMemory) -> None:
        if memory not in self._asleep:
            return
        # The engine cannot use what PyTorch's allocators keep on any rank of the host.
        torch.cuda.empty_cache()
        self._groups.barrier()
        woken = self._loop.submit(self._engine.wake((memory,))) if self._engine else None
        # Engines that are not lost have woken in any case.
        self._asleep.remove(memory)
        self._waiting.wait_together(woken, f"the engines to take memory for their {memory}")
