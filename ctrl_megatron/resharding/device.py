"""Who has the device, engine or trainer, and which weights the engines have.

Where both use the same devices there are two states and one way in each direction:

    trainer ── to_engine ──► engine      gradients and optimizer leave; caches are emptied; the
                                         engine's weights wake; the push, where other weights are
                                         needed; the trainer's weights leave; caches are emptied;
                                         the engine's key-value cache wakes
    engine ── to_trainer ──► trainer     the engine sleeps as a whole; what the trainer needs comes
                                         back when it is needed

A run begins with the engine alone. It sleeps before the first model is built. Every pass, step,
export and load of a model calls ``to_trainer``. A save needs no device: it reads what is away from
host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.models.parallel_model import ParallelModel, Part
from ctrl_megatron.models.shape import ModelShape
from ctrl_megatron.parallel.waiting import Waiting
from ctrl_megatron.resharding.plan import EngineLayout
from ctrl_megatron.resharding.push import PushReport, push
from ctrl_megatron.resharding.sources import (
    DirectorySource,
    MegatronSource,
    NoAdapters,
    WeightSource,
)
from ctrl_megatron.resharding.transports import Sender
from ctrl_megatron.rollout.engine import ENGINE_MEMORY, Engine, EngineMemory

Role = Literal["actor", "proxy"]


class DeviceOwner:
    """Hands the devices of all ranks over between trainer and engines, and pushes to the engines
    the weights that they lack. All ranks call the same methods in the same order.

    The engines generate for two roles in turn; every completion names the weights that drew it.
    """

    def __init__(
        self,
        engine: Engine | None,
        loop: BackgroundLoop,
        sender: Sender,
        layout: EngineLayout,
        waiting: Waiting,
        *,
        directories: Mapping[Role, str | Path],
        shared: bool = False,
        leaves: Sequence[Part] = (),
        rests_until: int = 0,
        lends: ModelShape | None = None,
        verify: bool = False,
    ) -> None:
        """``engine`` is a client of this host's engines on its first rank, None elsewhere.

        ``directories`` are the HF directories of the roles that no model of the trainer plays.
        With ``shared`` trainer and engines use the same devices, and the engines sleep from now on;
        without it they never sleep. ``leaves`` are the parts of a model that go to host memory
        while the engines generate. Before training step ``rests_until`` the actor does not learn.
        ``lends`` is the shape of the actor if the engines get only its adapters: the directories'
        roles are then played by the engines' own weights, which they keep while they sleep.
        ``verify`` compares checksums after every push.
        """
        self._engine, self._loop, self._sender = engine, loop, sender
        self._groups, self._layout, self._verify = sender.groups, layout, verify
        self._waiting = waiting
        self._lends = lends
        self._shared, self._leaves, self._rests_until = shared, leaves, rests_until
        self._loaded: str | None = None
        """The version that the engines have; None for weights that no push of ours has named."""
        self._models: list[ParallelModel] = []
        self._sources: dict[Role, WeightSource] = {}
        for role, directory in directories.items():
            self.read_from(role, directory)
        self._asleep = set[EngineMemory]()
        self._handing_over = False
        self._step = 0
        """The training step of the last ``to_engine``."""
        self._named: tuple[int, int] | None = None
        """Updates of the actor's model, and N of the version ``actor@N`` that they led to."""
        self._reports: list[PushReport] = []
        self.to_trainer()

    def adopt(self, model: ParallelModel, role: Role | None = None) -> None:
        """Share the device with ``model``, which has just been built and calls ``to_trainer``
        before it is used; push its weights for ``role``.

        RuntimeError if the engine was awake meanwhile.
        """
        if self._shared and self._asleep != set(ENGINE_MEMORY):
            raise RuntimeError(
                "a model was built while the engine has the device; call to_trainer() before"
            )
        self._models.append(model)
        if role is not None:
            self._sources[role] = MegatronSource(model, self._layout)

    def read_from(self, role: Role, directory: str | Path) -> None:
        """Push the weights of an HF directory for ``role`` from now on."""
        self._sources[role] = (
            DirectorySource(directory, self._layout, self._groups)
            if self._lends is None
            else NoAdapters(self._lends, self._layout, self._groups)
        )
        self._loaded = None

    def to_trainer(self) -> None:
        """Let the engine sleep, if it is awake and shares the device. Collective.

        Its weights are copied to host memory only if the next completion needs the same ones; else
        they are dropped, since a push comes before the next completion. Engines with adapters keep
        what they have.
        """
        if self._handing_over:
            raise RuntimeError(
                "a model was used while weights go to the engine; do that before or after"
            )
        if not self._shared or self._asleep == set(ENGINE_MEMORY):
            return
        if self._asleep:
            # A push failed half-way: the run is about to end.
            raise RuntimeError(f"the engine sleeps only in part ({', '.join(self._asleep)})")
        same = self._step < self._rests_until and self._loaded not in (None, "proxy")
        keeps = same or self._lends is not None
        # Another leader may still be generating, and no rank may use the memory before it is free.
        self._groups.barrier()
        sleep = self._engine.sleep(level=1 if keeps else 2) if self._engine else None
        self._waiting.together(
            self._loop.submit(sleep) if sleep else None, "the engines to free the device"
        )
        self._asleep = set(ENGINE_MEMORY)
        if not keeps:
            self._loaded = None

    def to_engine(self, role: Role, step: int) -> str:
        """Let the engine generate with the role's weights; returns their version. Collective.

        The version is ``proxy``, or ``actor@N`` for the actor's weights after N training steps.
        ``step`` is the number of training steps that are finished.
        """
        version, self._step = self.version(role, step), step
        if self._loaded != version:
            sent = self._sources[role].model
            if sent is not None and "weights" in sent.away:
                # They return to the memory of the engine's weights, which the push overwrites.
                self.to_trainer()
                sent.onload("weights")
            self._handing_over = True
            self._let_go(but=sent)
            self._wake("weights")
            # After a push that fails half-way the engine's weights have no version.
            self._loaded = None
            report = push(
                self._sources[role],
                self._engine,
                self._loop,
                self._sender,
                self._waiting,
                version=version,
                verify=self._verify,
            )
            self._reports.append(report)
            self._loaded = version
        self._handing_over = True
        self._let_go()
        for memory in ENGINE_MEMORY:
            self._wake(memory)
        self._handing_over = False
        return version

    def take_reports(self) -> list[PushReport]:
        """The pushes since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """Close the connections to this host's engines."""
        if self._engine:
            self._loop.run_last(self._engine.close())

    def version(self, role: Role, step: int) -> str:
        """The name of the role's weights as they are now: a new one whenever they have changed.
        ``step`` as in ``to_engine``.
        """
        if role == "proxy":
            return role
        model = self._sources[role].model
        updates = 0 if model is None else model.updates
        if self._named is None:
            self._named = updates, step
        elif self._named[0] != updates:
            self._named = updates, max(step, self._named[1] + 1)
        return f"{role}@{self._named[1]}"

    def _let_go(self, but: ParallelModel | None = None) -> None:
        for model in self._models:
            stays = "weights" if model is but else None
            for part in self._leaves:
                if part != stays:
                    model.offload(part)

    def _wake(self, memory: EngineMemory) -> None:
        if memory not in self._asleep:
            return
        # The engine cannot use what PyTorch's allocators keep on any rank of the host.
        torch.cuda.empty_cache()
        self._groups.barrier()
        woken = self._loop.submit(self._engine.wake((memory,))) if self._engine else None
        self._waiting.together(woken, f"the engines to take memory for their {memory}")
        self._asleep.remove(memory)
