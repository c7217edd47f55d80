"""Writes the results of a run: metrics, timelines, examples, the final table, the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctrl_megatron.checkpoint.files import write_text_atomically
from ctrl_megatron.config import Config, dict_without_secrets, parse_yaml, to_yaml
from ctrl_megatron.config.load import with_current_key_names
from ctrl_megatron.config.secrets import HIDDEN, hide_secrets_in_tree
from ctrl_megatron.errors import UserError, read_json, read_text
from ctrl_megatron.graph.graph import TaskGraph
from ctrl_megatron.graph.picture import FILE, describe_nodes, graph_tree_lines
from ctrl_megatron.metrics import (
    Display,
    JsonlWriter,
    MetricsServer,
    PhaseMeter,
    Timeline,
    build_sinks,
)
from ctrl_megatron.metrics.report import write_report
from ctrl_megatron.metrics.sinks import ExampleSink
from ctrl_megatron.metrics.warnings import StepWarnings
from ctrl_megatron.parallel.layout import Layout

_SUMMARY = "summary.json"


class Recorder:
    """Writes on rank 0; on other ranks all methods do nothing."""

    def __init__(
        self,
        config: Config,
        *,
        active: bool,
        total_steps: int,
        served: MetricsServer | None = None,
    ) -> None:
        """``served`` gets every metric and stays open."""
        self.active, self.run_dir = active, Path(config.trainer.run_dir)
        self.display: Display | None = None
        self._served = served
        if not active:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._config = to_yaml(config)
        self.display = Display(total_steps).start()
        tree, trainer = dict_without_secrets(config), config.trainer
        # Trackers file the run under these names, whatever they were written as.
        names = {"project_name": trainer.project_name, "experiment_name": trainer.experiment_name}
        tree["trainer"] |= names
        self._sinks = build_sinks(trainer.logger, self.run_dir, tree, self.display)
        self._timelines: JsonlWriter | None = JsonlWriter(self.run_dir / "timeline.jsonl")
        self._examples = JsonlWriter(self.run_dir / "examples.jsonl")
        self._warned = JsonlWriter(self.run_dir / "warnings.jsonl")
        self._warnings, self._shown = StepWarnings(), set[str]()

    def timeline(self, meter: PhaseMeter | None = None) -> Timeline:
        """A timeline that also shows its phases on the terminal."""
        if self.display is None:
            return Timeline(meter=meter)
        begin, end = self.display.begin_phase, self.display.end_phase
        return Timeline(on_begin=begin, on_end=end, meter=meter)

    def record_config(self) -> None:
        """Write the configuration of a run that begins or continues into its directory."""
        if self.active and (changed := write_config_keeping_earlier(self.run_dir, self._config)):
            self.show_line(f"changed since the last start: {'; '.join(changed)}")

    def show_graph(self, graph: TaskGraph) -> None:
        """Draw the nodes of a step on the terminal, and keep them for the report."""
        if self.active:
            write_text_atomically(self.run_dir / FILE, json.dumps(describe_nodes(graph), indent=1))
            for line in graph_tree_lines(graph):
                self.show_line(line)

    def show_line(self, text: str) -> None:
        if self.display is not None:
            self.display.print_line(text)

    def begin_step(self, step: int) -> None:
        if self.display is not None:
            self.display.begin_step(step)

    def end_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        timeline: Mapping[str, Any],
        examples: Sequence[Mapping[str, Any]],
    ) -> None:
        if not self.active:
            return
        self.log(step, metrics)
        self.append_timeline(timeline)
        for example in examples:
            self._examples.append({"step": step, **example})
        for sink in self._sinks:
            if examples and isinstance(sink, ExampleSink):
                sink.show(step, examples)
        if self.display is not None:
            self.display.end_step(step)

    def append_timeline(self, timeline: Mapping[str, Any]) -> None:
        """Append to ``timeline.jsonl``; a run does not end for want of it."""
        if not self.active or self._timelines is None:
            return
        try:
            self._timelines.append(timeline)
        except OSError as error:
            self._timelines.close()
            self._timelines = None
            self.show_line(f"warning: no more timelines are recorded: {error}")

    def _warn(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record every warning for the report, and print the first of its kind."""
        for name, text in self._warnings.check(metrics).items():
            self._warned.append({"step": step, "warning": name, "text": text})
            if name not in self._shown:
                self._shown.add(name)
                self.show_line(f"warning: {text} (shown once, counted in the report)")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a training step, or of a validation outside of it."""
        if self.active:
            for sink in (*self._sinks, *((self._served,) if self._served else ())):
                sink.log(step, metrics)
            self._warn(step, metrics)

    def add_stage(self, stage: str, results: Mapping[str, float]) -> None:
        if self.active:
            add_stage(self.run_dir, stage, results)

    def close(self, *, report: bool) -> Path | None:
        """Flush everything and, with ``report``, write the HTML page; returns its path."""
        if not self.active:
            return None
        for sink in self._sinks:
            sink.close()
        if self._timelines is not None:
            self._timelines.close()
        self._examples.close()
        self._warned.close()
        if self.display is not None:
            self.display.close()
        return write_report(self.run_dir) if report else None


def banner(
    config: Config,
    layout: Layout,
    *,
    steps: str,
    rows: int,
    dropped: Mapping[str, int],
    validation: int,
    services: str = "",
) -> list[str]:
    """Lines for the terminal at the start of a run; ``dropped`` maps reasons to numbers of rows."""
    run_dir, model = Path(config.trainer.run_dir), config.actor_rollout_ref.model
    reasons = "; ".join(f"{n} left out: {reason}" for reason, n in dropped.items() if n)
    left_out = f" ({reasons})" if reasons else ""
    validated = f", {validation} to validate" if validation else ""
    beside = f"; {services}" if services else ""
    return [
        f"run {run_dir}: {steps}; report: {run_dir / 'report.html'}",
        f"rows: {rows} to train{left_out}{validated}",
        f"model {model.path} ({model.dtype}): tensor {layout.tensor} x context {layout.context} x "
        f"pipeline {layout.pipeline} x data {layout.data} ranks{beside}",
    ]


def write_config_keeping_earlier(run_dir: Path, text: str) -> list[str]:
    """Write ``config.yaml``; a different one of an earlier start is kept as ``config.N.yaml``.
    Returns the differences as ``key: before -> now``.
    """
    path, changed = run_dir / "config.yaml", config_changes(run_dir, text)
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        number = 1 + len(list(run_dir.glob("config.*.yaml")))
        path.rename(run_dir / f"config.{number}.yaml")
    write_text_atomically(path, text)
    return changed


def config_changes(run_dir: Path, text: str) -> list[str]:
    """Differences of the configuration ``text`` from that of the directory, as ``key: before ->
    now``, without what can be a secret; none if the directory has no configuration.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        return []
    trees = (parse_yaml(part, str(path))[0] for part in (read_text(path), text))
    old, new = (_flat(hide_secrets_in_tree(with_current_key_names(tree))) for tree in trees)
    keys = [
        key
        for key in {**old, **new}
        if old.get(key) != new.get(key) and HIDDEN not in f"{old.get(key)}{new.get(key)}"
    ]
    return [f"{key}: {old.get(key, 'unset')} -> {new.get(key, 'unset')}" for key in keys]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    parts = (_flat(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in tree.items())
    return {key: value for part in parts for key, value in part.items()}


def read_stage_table(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of the run's final table. UserError if the file is no such table."""
    path = run_dir / _SUMMARY
    found = read_json(path) if path.is_file() else {"table": []}
    rows = found.get("table") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(r, dict) and "stage" in r for r in rows):
        raise UserError("is no table of stages", file=path, remedy="remove it")
    return rows


def add_stage(run_dir: Path, stage: str, results: Mapping[str, float]) -> None:
    """Add a row to the run's final table; an earlier row of the same stage is replaced."""
    path, table = run_dir / _SUMMARY, read_stage_table(run_dir)
    table = [row for row in table if row["stage"] != stage]
    write_text_atomically(
        path, json.dumps({"table": [*table, {"stage": stage, **results}]}, indent=1)
    )
