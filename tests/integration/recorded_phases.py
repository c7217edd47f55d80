"""Writes down, in a rank of a real run, who takes the device, leaves it and uses it, in order."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable
from typing import Any

import torch


def record_phases(stop_at: int) -> list[str]:
    """Events of this process from now on; at generation ``stop_at`` (from 1, 0 for none) it asks
    itself to stop, while the engine generates.

    ``build``, ``pass``, ``save`` and ``load`` are recorded when they begin, ``onload`` and
    ``offload`` where memory really comes or goes, ``sleep N``, ``wake MEMORY``, ``push`` and
    ``generate`` when the engine is asked (on ranks that ask it).
    """
    from ctrl_megatron.checkpoint.store import CheckpointStore
    from ctrl_megatron.models.offload import OffloadedTensors, storages_of
    from ctrl_megatron.models.parallel_model import ParallelModel
    from ctrl_megatron.parallel import cpu_platform
    from ctrl_megatron.rollout.client import RemoteEngine

    events: list[str] = []

    def note(owner: Any, name: str, event: Callable[..., str | None]) -> None:
        inner = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if (said := event(*args, **kwargs)) is not None:
                events.append(said)
            return inner(*args, **kwargs)

        static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(noted) if static else noted)

    def generation(*_: Any, **__: Any) -> str:
        if events.count("generate") + 1 == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return "generate"

    cpu_platform.install_cpu_platform()
    note(torch.cuda, "empty_cache", lambda: "empty")
    note(ParallelModel, "__init__", lambda *_: "build")
    # Whatever they need has come back by then.
    note(ParallelModel, "_micro_batches", lambda *_, **__: "pass")
    note(OffloadedTensors, "offload", lambda m: "offload" if storages_of(m._tensors()) else None)
    note(OffloadedTensors, "onload", lambda memory: "onload" if memory.is_offloaded else None)
    note(CheckpointStore, "save", lambda *_: "save")
    note(CheckpointStore, "load", lambda *_, **__: "load")
    note(RemoteEngine, "sleep", lambda _, level: f"sleep {level}")
    note(RemoteEngine, "wake", lambda _, tags: f"wake {'+'.join(tags)}")
    note(RemoteEngine, "update", lambda *_: "push")
    note(RemoteEngine, "generate", generation)
    return events
