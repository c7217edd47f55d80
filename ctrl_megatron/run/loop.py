"""The training loop of every pipeline: steps, saves, exports and validation. RL and fine-tuning
differ only in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from tensordict import TensorDict

from ctrl_megatron.checkpoint.store import CheckpointStore, SaveReport
from ctrl_megatron.data.sampler import Sampler
from ctrl_megatron.errors import ServiceFault, UserError
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.graph.executor import Executor, ExecutorWorker, with_policy_prefix
from ctrl_megatron.graph.graph import TaskGraph
from ctrl_megatron.graph.world_link import SingleWorld, WorldLink, WorldReport
from ctrl_megatron.metrics import overlapped_host_seconds, seconds_by_name
from ctrl_megatron.metrics.timeline import timeline_record
from ctrl_megatron.models.parallel_model import ParallelModel, SkippedUpdate
from ctrl_megatron.parallel.groups import RankSet
from ctrl_megatron.parallel.stop import StopRequested
from ctrl_megatron.record.dump import ROW_ID
from ctrl_megatron.record.recorder import Recorder
from ctrl_megatron.steps.performance import DeviceMemory


class Resumable(Protocol):
    """A part of the run whose state a checkpoint contains, as JSON."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class LoopWorker(ExecutorWorker, Protocol):
    """The part of the worker that the loop uses."""

    step: int

    @property
    def agents(self) -> Sequence[LoopWorker]: ...  # the workers of all policies, this one first

    @property
    def trained_models(
        self,
    ) -> Mapping[str, ParallelModel]: ...  # what optimizers change, by folder

    @property
    def saved_models(self) -> Mapping[str, ParallelModel]: ...  # what a checkpoint holds, by folder


class StepWatcher(Protocol):
    """Looks at steps and changes nothing of them. All methods are collective."""

    def begin(self, step: int) -> None: ...

    def before_update(self, step: int, batch: TensorDict, policy: int) -> None:
        """The next node of the step changes weights of the policy with that number; ``batch`` is
        the policy's, on this rank."""
        ...

    def end(self, step: int, batches: Sequence[TensorDict], metrics: Mapping[str, float]) -> None:
        """The last node of the step has run; ``batches`` are those of all policies, and ``metrics``
        the nodes'."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The schedule of the loop; frequencies in steps, -1 for never."""

    batch_size: int
    """Rows of a step, or of a draw of dynamic sampling."""
    total_steps: int
    total_epochs: int | None = None
    """If the graph draws rows itself, in batches of ``batch_size``: passes over them after which no
    further step begins."""
    save_freq: int = -1
    save_hf_freq: int = -1
    test_freq: int = -1
    val_before_train: bool = False
    resume_mode: str = "auto"
    max_bad_steps: int = 3
    """Steps in a row with a skipped update after which the run ends."""
    stage: str = "RL"
    """Names the rows of the final table: ``before RL``, ``after RL``."""


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """Draws rows, runs the graph, records, validates and saves.

    It knows no field of any pipeline: metrics, examples and validation are the graph's
    (``graph.report``).
    """

    worker: LoopWorker
    graph: TaskGraph
    sampler: Sampler
    store: CheckpointStore
    recorder: Recorder
    schedule: Schedule
    checkpointed: Mapping[str, Resumable] = field(default_factory=dict)
    """Further state to save, by name; the sampler is always saved."""
    optional_state: Mapping[str, Resumable] = field(default_factory=dict)
    """State captured while saving; older checkpoints may not contain it. Collective."""
    constant_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that every step repeats."""
    memory: DeviceMemory | None = None
    """Measures the worker's timeline where there is a GPU."""
    link: WorldLink = field(default_factory=SingleWorld)
    everyone: RankSet | None = None
    """All ranks of the run; None for those of ``worker.groups``."""
    passes: Callable[[], tuple[float, float]] | None = None
    """``WorldReport.passes`` of this world, for the world of rank 0. Collective."""
    on_world_reports: Callable[[Sequence[WorldReport]], None] = lambda reports: None
    """Gets the other worlds' reports of a step, before its metrics are computed."""
    watchers: Sequence[StepWatcher] = ()
    keep_batch: Callable[[int, TensorDict], Path] | None = None
    """(step, batch just before the update) -> the directory into which it is written; for the step
    that ends a run. Collective."""
    _updating: dict[int, TensorDict] = field(default_factory=dict)
    """The batch of each policy just before its update in the step in hand, or in the last one."""
    _bad: list[SkippedUpdate] = field(default_factory=list)
    """The last skipped update of each of the last steps in a row that had one."""
    _state: dict[str, Any] | None = None
    _saved: int = 0
    """The step whose state is on disk; at step 0 the models equal their files."""
    _metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of saves since the last recorded step."""

    def resume(self) -> None:
        """Continue from the configured checkpoint, if there is one. Collective. A checkpoint that
        cannot be loaded leaves the run's directory as it was.
        """
        first, mode = (self.everyone or self.worker.groups).is_first, self.schedule.resume_mode
        parts = ("sampler", *self.checkpointed)
        loaded = self.store.load_newest(self._saved_models, mode, parts=parts)
        if loaded is not None:
            state = loaded.state
            self.sampler.load_state_dict(state["sampler"])
            for name, part in self.checkpointed.items():
                part.load_state_dict(state[name])
            for name, part in self.optional_state.items():
                part.load_state_dict(state.get(name, {}))
            self._saved = state["step"]
            self._set_step(self._saved)
        self.recorder.record_config()
        for remark in loaded.remarks if loaded else ():
            self.recorder.show_line(f"warning: {remark}")
        checkpoint = loaded.checkpoint if loaded else None
        left = self.store.set_aside_later(mode, checkpoint) if first else []
        if left:
            names = ", ".join(path.name for path in left)
            self.recorder.show_line(
                f"set aside in {left[0].parent}: {names}, ahead of where this starts"
            )
        if checkpoint is not None:
            self.recorder.show_line(
                f"continuing from {checkpoint.path} after step {self.worker.step}"
            )

    def run(self) -> bool:
        """Train to the last step; False if a stop was requested. Saves in both cases, and before it
        raises ServiceFault, unless the step in hand has begun to change weights.
        """
        worker, schedule = self.worker, self.schedule
        executor = Executor(
            self.graph,
            worker,
            agents=worker.agents,
            before_update=self._before_update,
            link=self.link,
        )
        try:
            if schedule.val_before_train and worker.step == 0:
                self._validate(f"before {schedule.stage}")
            self._state = self._snapshot()
            last = self._is_over()
            while not last:
                self._step(executor)
                self._require_good(worker.step)
                last = self._is_over()
                # Weights that give no finite loss are not saved in place of earlier ones.
                if last or (_due(worker.step, schedule.save_freq) and not self._bad):
                    self._save()
                if _due(worker.step, schedule.save_hf_freq) and not self._bad:
                    self._export()
                if not last and _due(worker.step, schedule.test_freq):
                    self._validate(f"step {worker.step}")
            if worker.step < schedule.total_steps:
                self.recorder.show_line(
                    f"{schedule.total_epochs} epochs of rows are drawn after step {worker.step}"
                )
            self._validate(f"after {schedule.stage}")
            self._report_save(self.store.wait_for_save())
            self.link.synchronize_worlds()
        except ServiceFault as why:
            if not self.link.propagate_error(why, weights_changed=executor.weights_changed):
                self._save_newest()
            raise
        except StopRequested as why:
            self.link.propagate_error(why, weights_changed=False)
            self._save_newest()
            kept = f"; the state after step {worker.step} is saved" if worker.step else ""
            self.recorder.show_line(f"stopped as asked{kept or ' before the first step ended'}")
            return False
        return True

    def _save_newest(self) -> None:
        """Save the state after the last finished step, unless it is saved already."""
        if self._saved != self.worker.step:
            self._save()
        self._report_save(self.store.wait_for_save())

    def _is_over(self) -> bool:
        """Whether the last step is done, or the rows of all epochs have been drawn."""
        schedule, epochs = self.schedule, self.schedule.total_epochs
        drawn = epochs is not None and self.sampler.is_exhausted(epochs, schedule.batch_size)
        return drawn or self.worker.step >= schedule.total_steps

    def _before_update(self, batch: TensorDict, policy: int) -> None:
        self._updating[policy] = batch.copy()
        for watcher in self.watchers:
            watcher.before_update(self.worker.step + 1, batch, policy)

    def _set_step(self, step: int) -> None:
        for agent in self.worker.agents:
            agent.step = step

    @property
    def _saved_models(self) -> dict[str, ParallelModel]:
        return {name: m for agent in self.worker.agents for name, m in agent.saved_models.items()}

    def _step(self, executor: Executor) -> None:
        worker, step, report = self.worker, self.worker.step + 1, self.graph.report
        everyone = self.everyone or worker.groups
        self.link.wait_before_step()
        for watcher in self.watchers:
            watcher.begin(step)
        self.recorder.begin_step(step)
        worker.timeline.begin_step()
        size = 0 if self.graph.draws_own_rows else self.schedule.batch_size
        rows = torch.tensor(self.sampler.next_batch(size) if size else [], dtype=torch.int64)
        _, metrics = executor.run_step(TensorDict({"row": rows}, batch_size=[len(rows)]))
        self._set_step(step)
        # Before anything that a stop can interrupt: weights and state are of the same step.
        self._state = self._snapshot()
        phases, elapsed = worker.timeline.phases(), worker.timeline.elapsed()
        own = WorldReport(
            rank=everyone.rank,
            metrics=metrics,
            phases=phases,
            skipped=self._skipped(),
            passes=self.passes() if self.passes else (0.0, 0.0),
            sampler=self.sampler.state_dict(),
        )
        others = self._reports(own)
        for other in others:
            took = seconds_by_name(other.phases)
            # Several worlds may wait for the same one: the longest counts.
            metrics |= {**other.metrics} | {n: max(s, metrics.get(n, 0.0)) for n, s in took.items()}
        for watcher in self.watchers:
            watcher.end(step, executor.batches, metrics)
        metrics |= self._report_skipped(step, (own, *others))
        metrics |= seconds_by_name(phases)
        metrics |= {"time/step": elapsed, "perf/overlap_seconds": overlapped_host_seconds(phases)}
        held = psutil.Process().memory_info().rss / (1 << 30)
        metrics["memory/host_gib"] = max(everyone.all_gather(held))
        if self.memory is not None:
            metrics |= self.memory.take_peak_metrics(everyone)
        own_batches = list(zip(worker.agents, executor.batches, strict=True))
        metrics |= self.constant_metrics
        for policy, (agent, own_batch) in enumerate(own_batches):
            metrics |= with_policy_prefix(report.metrics(agent, own_batch), policy)
        self._report_save(self.store.pop_save_report())
        metrics |= self._metrics
        self._metrics = {}
        examples = [
            example
            for agent, own_batch in own_batches
            for example in (report.examples(agent, own_batch) if everyone.is_first else ())
        ]
        for other in others:
            self.recorder.append_timeline(timeline_record(step, other.rank, other.phases))
        record = timeline_record(step, everyone.rank, phases)
        self.recorder.end_step(step, metrics, record, examples)

    def _reports(self, own: WorldReport) -> list[WorldReport]:
        """The other worlds' reports. Collective."""
        others = self.link.wait_after_step(own)
        if others:
            self.on_world_reports(others)
        if not self.link.has_rank_zero:
            # A node of the world of rank 0 may have drawn rows.
            self.sampler.load_state_dict(dict(others[0].sampler))
        return others

    def _skipped(self) -> tuple[tuple[str, SkippedUpdate, tuple[str, ...]], ...]:
        """``WorldReport.skipped`` of this world. Collective."""
        found = []
        for policy, agent in enumerate(self.worker.agents):
            for name, model in agent.trained_models.items():
                for one in model.take_skipped_updates():
                    parts = agent.groups.gather_data_ranks(self._names(one.rows, policy))
                    rows = dict.fromkeys(row for part in parts for row in part)
                    found.append((name, one, tuple(rows)))
        return tuple(found)

    def _report_skipped(self, step: int, worlds: Sequence[WorldReport]) -> dict[str, float]:
        """``update/skipped``: updates of the step that were skipped; nothing where there were
        none."""
        skipped = [one for report in worlds for one in report.skipped]
        self._bad = [*self._bad, skipped[-1][1]] if skipped else []
        for name, one, rows in skipped:
            where = f"; rows: {', '.join(rows)}" if rows else ""
            self.recorder.show_line(
                f"warning: step {step} does not update {name}: {one.reason}{where}"
            )
        return {"update/skipped": float(len(skipped))} if skipped else {}

    def _require_good(self, step: int) -> None:
        """UserError, with the batch kept, after ``max_bad_steps`` steps in a row with a skipped
        update. Collective.
        """
        if len(self._bad) < self.schedule.max_bad_steps:
            return
        last, kept = self._bad[-1], ""
        if self.keep_batch is not None and 0 in self._updating:
            folder = self.keep_batch(step, self._updating[0])
            kept = f", or look at the batch in {folder} with ctrl-replay"
        raise UserError(
            f"{len(self._bad)} steps in a row, up to step {step}, skipped an update "
            f"(trainer.max_bad_steps): {last.reason}; the last checkpoint is that of step "
            f"{self._saved}",
            key=last.learning_rate,
            remedy=f"lower it, continue from an older checkpoint (trainer.resume_mode){kept}",
        )

    def _names(self, places: Sequence[int], policy: int) -> list[str]:
        """The rows of samples of this data rank's batch, as far as the batch names them."""
        batch = self._updating.get(policy)
        if batch is None or not places:
            return []
        if ROW_ID in batch:
            names = texts(batch[ROW_ID])
        else:
            names = [str(row) for row in batch["row"].tolist()] if "row" in batch else []
        return [names[place] for place in places if place < len(names)]

    def _snapshot(self) -> dict[str, Any]:
        parts = {"sampler": self.sampler, **self.checkpointed}
        return {name: part.state_dict() for name, part in parts.items()}

    def _save(self) -> None:
        with self.worker.timeline.phase("save"):
            # A run that was stopped within a step continues with that step's batch.
            state = self._state or self._snapshot()
            state = {
                **state,
                **{name: part.state_dict() for name, part in self.optional_state.items()},
            }
            self._report_save(self.store.wait_for_save())
            self.store.save(self._saved_models, self.worker.step, state)
        self._saved = self.worker.step
        self._report_save(self.store.pop_save_report())

    def _report_save(self, saved: SaveReport | None) -> None:
        if saved is not None:
            self.recorder.show_line(str(saved))
            self._metrics |= saved.metrics()

    def _export(self) -> None:
        with self.worker.timeline.phase("save_hf"):
            models = {n: m for agent in self.worker.agents for n, m in agent.trained_models.items()}
            path = self.store.export_hf(models, self.worker.step)
        self.recorder.show_line(f"wrote {path}")

    def _validate(self, stage: str) -> None:
        validate = self.graph.report.validate
        if validate is None:
            return
        results = validate(self.worker)
        self.recorder.log(self.worker.step, {f"val/{k}": v for k, v in results.items()})
        self.recorder.add_stage(stage, results)


def _due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0
