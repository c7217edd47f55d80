"""Who holds the device, engine or trainer, and the way from one to the other.

Where both live on the same devices there are two states with one way each between them:

    trainer ── to_engine ──► engine      gradients and optimizer leave; caches are emptied; the
                                         engine's weights wake; the push, where other weights are
                                         needed; the trainer's weights leave; caches are emptied;
                                         the engine's key-value cache wakes
    engine ── to_trainer ──► trainer     the engine sleeps as a whole; what the trainer needs comes
                                         back when it is needed

A run begins with the engine alone. It sleeps before the first model is built, and every pass, step,
export and load of a model goes through ``to_trainer`` by itself. A save needs no device: what is
away is read from host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ctrl_megatron.models.parallel_model import ParallelModel, Part
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.parallel.waiting import result_of
from ctrl_megatron.resharding.engine_weights import EngineLink, EngineWeights, Role
from ctrl_megatron.rollout.engine import ENGINE_MEMORY, EngineMemory


class DeviceOwner:
    """Hands the devices of all ranks over; all ranks call the same methods in the same order.

    ``link`` is given on ranks that drive an engine. Without ``shared`` each of the two has its own
    memory: the engine never sleeps, but what is configured to leave still does. ``leaves`` are the
    parts of a model that go to host memory while the engine generates.
    """

    def __init__(
        self,
        link: EngineLink | None,
        groups: ProcessGroups,
        *,
        shared: bool,
        leaves: Sequence[Part] = (),
    ) -> None:
        self._link, self._groups, self._shared = link, groups, shared
        self._leaves = leaves
        self._models: list[ParallelModel] = []
        self._asleep = set[EngineMemory]()
        self._weights: EngineWeights | None = None
        self._handing_over = False
        self.needed_next: Callable[[], str | None] = lambda: None
        """The version that the engine will be asked for when it wakes, None if that does not exist
        yet. Only these are kept in its sleep."""

    def adopt(self, model: ParallelModel) -> None:
        """Share the device with ``model``, which has just been built.

        RuntimeError if the engine was awake meanwhile.
        """
        if self._shared and self._asleep != set(ENGINE_MEMORY):
            raise RuntimeError(
                "a model was built while the engine holds the device; call to_trainer() before"
            )
        self._models.append(model)
        model.take_device = self.to_trainer

    def to_trainer(self) -> None:
        """Let the engine sleep, if it is awake. Collective.

        Its weights are copied to host memory only if it will be asked for just these again; else
        they are forgotten, since a push comes before the next completion.
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
        held = self._weights.loaded if self._weights else None
        keeps = held is not None and held == self.needed_next()
        # Another leader may still be generating; and nobody may take the memory before it is free.
        self._groups.barrier()
        if self._link:
            sleep = self._link.engine.sleep(level=1 if keeps else 2)
        result_of(self._link.loop.submit(sleep) if self._link else None, self._groups)
        self._asleep = set(ENGINE_MEMORY)
        if self._weights and not keeps:
            self._weights.forget()

    def to_engine(self, weights: EngineWeights, role: Role) -> str:
        """Let the engine generate with the role's weights; returns their version. Collective."""
        self._weights = weights
        if not weights.holds(role):
            sent = weights.model(role)
            if sent is not None and "weights" in sent.away:
                # They come back to the place of the engine's, which are overwritten anyway.
                self.to_trainer()
                sent.onload("weights")
            self._handing_over = True
            self._let_go(but=sent)
            self._wake("weights")
            weights.load(role)
        self._handing_over = True
        self._let_go()
        for memory in ENGINE_MEMORY:
            self._wake(memory)
        self._handing_over = False
        return weights.version(role)

    def _let_go(self, but: ParallelModel | None = None) -> None:
        for model in self._models:
            stays = "weights" if model is but else None
            for part in self._leaves:
                if part != stays:
                    model.offload(part)

    def _wake(self, memory: EngineMemory) -> None:
        if memory not in self._asleep:
            return
        # What PyTorch's allocators hold back on any rank of the host is lost to the engine.
        torch.cuda.empty_cache()
        self._groups.barrier()
        woken = self._link.loop.submit(self._link.engine.wake((memory,))) if self._link else None
        result_of(woken, self._groups)
        self._asleep.remove(memory)
