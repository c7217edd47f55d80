"""Profiles of single steps (``trainer.profile_steps``), below ``RUN/profile``.

``step_N.json`` has the phases of all ranks; ``step_N.rank_R.torch.json`` the operators of one rank
as torch.profiler sees them; ``step_N.rank_R.memory.pickle`` what one rank's GPU memory was used for
(https://pytorch.org/memory_viz opens it). Nsight Systems records the same steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tensordict import TensorDict

from ctrl_megatron.checkpoint.files import write_text_atomically
from ctrl_megatron.config import Config
from ctrl_megatron.graph.executor import ExecutorWorker
from ctrl_megatron.metrics.trace import chrome_trace

FOLDER = "profile"
_MEMORY_EVENTS = 200_000
"""Allocations that the memory's history keeps, the newest."""


class StepProfile:
    """A ``loop.StepWatcher`` that writes the phases of the profiled steps, on all ranks."""

    def __init__(self, config: Config, worker: ExecutorWorker) -> None:
        self._trainer, self._worker = config.trainer, worker
        self._folder = Path(config.trainer.run_dir) / FOLDER
        self._torch: torch.profiler.profile | None = None
        self._on_gpu = worker.groups.device.type == "cuda"

    def begin(self, step: int) -> None:
        """Start the configured recordings of a profiled step. Collective: ranks leave together, so
        that their times count from the same moment.
        """
        if not self._trainer.is_profile_step(step):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._trainer.profile_memory:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        if self._trainer.profile_torch:
            self._torch = torch.profiler.profile(profile_memory=self._trainer.profile_memory)
            self._torch.start()
        self._worker.groups.barrier()
        if self._on_gpu:
            torch.cuda.profiler.start()

    def before_update(self, step: int, batch: TensorDict, policy: int) -> None:
        """Nothing is done here."""

    def end(self, step: int, batches: Sequence[TensorDict], metrics: Mapping[str, float]) -> None:
        """Write the step's files. Collective."""
        if not self._trainer.is_profile_step(step):
            return
        groups, name = self._worker.groups, f"step_{step}"
        own = self._folder / f"{name}.rank_{groups.rank}"
        ranks = groups.all_gather(self._worker.timeline.phases())
        if self._on_gpu:
            # The first rank that stops ends the recording of its host.
            torch.cuda.profiler.stop()
        if groups.is_first:
            trace = chrome_trace(ranks, step)
            write_text_atomically(self._folder / f"{name}.json", json.dumps(trace))
        if self._torch is not None:
            self._torch.stop()
            draft = own.with_name(f".{own.name}.torch.json")
            self._torch.export_chrome_trace(str(draft))
            os.replace(draft, own.with_name(f"{own.name}.torch.json"))
            self._torch = None
        if self._trainer.profile_memory:
            draft = own.with_name(f".{own.name}.memory.pickle")
            torch.cuda.memory._dump_snapshot(str(draft))
            os.replace(draft, own.with_name(f"{own.name}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)


def step_profile_watchers(config: Config, worker: ExecutorWorker) -> tuple[StepProfile, ...]:
    """The watcher of a run that profiles steps; none where it does not."""
    return (StepProfile(config, worker),) if config.trainer.profile_steps else ()
