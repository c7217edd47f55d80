"""The training loop, for every pipeline: RL and SFT differ in the graph they walk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from ctrl_megatron.checkpoint.store import CheckpointStore
from ctrl_megatron.data.sampler import ResumableSampler
from ctrl_megatron.models.parallel_model import ParallelModel
from ctrl_megatron.pipeline.executor import Executor, Worker
from ctrl_megatron.pipeline.interrupt import StopRequested
from ctrl_megatron.pipeline.recorder import Recorder


class Resumable(Protocol):
    """A part of the run with state that a checkpoint must hold."""

    def state_dict(self) -> dict[str, Any]:
        """JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``."""
        ...


class LoopWorker(Worker, Protocol):
    """What the loop needs of the worker that the nodes get."""

    step: int

    @property
    def trained(self) -> Mapping[str, ParallelModel]:
        """The models that a checkpoint holds, by folder."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """When to do what; frequencies in steps, -1 for never."""

    batch_size: int
    """Rows drawn for a step; 0 where the first node draws its own."""
    total_steps: int
    save_freq: int = -1
    test_freq: int = -1
    val_before_train: bool = False
    resume_mode: str = "auto"
    stage: str = "RL"
    """Names the rows of the final table: ``before RL``, ``after RL``."""


Measure = Callable[[TensorDict], tuple[dict[str, float], list[dict[str, Any]]]]
"""From a finished step's batch to more metrics and to examples for the report. Collective."""


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """Draws batches, walks the graph, validates and saves when it is time."""

    worker: LoopWorker
    executor: Executor
    sampler: ResumableSampler
    store: CheckpointStore
    recorder: Recorder
    options: LoopOptions
    measure: Measure
    validate: Callable[[], dict[str, float]] | None = None
    parts: Mapping[str, Resumable]
    """Further state to save, by name; the sampler is always saved."""
    _state: dict[str, Any] | None = None
    _saved: int | None = None

    def resume(self) -> None:
        """Continue from the configured checkpoint, if there is one. Collective."""
        found = self.store.find(self.options.resume_mode)
        if found is None:
            return
        state = self.store.load(self.worker.trained, found)
        self.sampler.load_state_dict(state["sampler"])
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.worker.step = self._saved = state["step"]
        self.recorder.say(f"continuing from {found.path} after step {self.worker.step}")

    def run(self) -> bool:
        """Train to the last step; False if a stop was asked for. Saves either way."""
        try:
            self._train()
        except StopRequested:
            if self._saved != self.worker.step:
                self._save()
            self.recorder.say(f"stopped as asked; the state after step {self.worker.step} is saved")
            return False
        return True

    def _train(self) -> None:
        options, worker = self.options, self.worker
        if options.val_before_train and worker.step == 0:
            self._validate(f"before {options.stage}")
        self._state = self._snapshot()
        while worker.step < options.total_steps:
            self._step()
            self._state = self._snapshot()
            if _due(worker.step, options.save_freq) or worker.step == options.total_steps:
                self._save()
            if _due(worker.step, options.test_freq) and worker.step < options.total_steps:
                self._validate(f"step {worker.step}")
        self._validate(f"after {options.stage}")

    def _step(self) -> None:
        worker, step = self.worker, self.worker.step + 1
        self.recorder.begin_step(step)
        worker.timeline.begin_step()
        size = self.options.batch_size
        rows = torch.tensor(self.sampler.next_batch(size) if size else [], dtype=torch.int64)
        batch, metrics = self.executor.run_step(TensorDict({"row": rows}, batch_size=[len(rows)]))
        worker.step = step
        more, examples = self.measure(batch)
        record = worker.timeline.record(step, worker.groups.rank)
        self.recorder.end_step(step, {**metrics, **more}, record, examples)

    def _snapshot(self) -> dict[str, Any]:
        parts = {"sampler": self.sampler, **self.parts}
        return {name: part.state_dict() for name, part in parts.items()}

    def _save(self) -> None:
        with self.worker.timeline.phase("save"):
            # Stopped within a step, the run continues with that step's batch.
            state = self._state or self._snapshot()
            path = self.store.save(self.worker.trained, self.worker.step, state)
        self._saved = self.worker.step
        self.recorder.say(f"saved {path}")

    def _validate(self, stage: str) -> None:
        if self.validate is None:
            return
        results = self.validate()
        self.recorder.log(self.worker.step, {f"val/{k}": v for k, v in results.items()})
        self.recorder.add_stage(stage, results)


def _due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0
