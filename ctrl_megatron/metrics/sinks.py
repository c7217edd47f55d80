"""Sinks of metrics: terminal, JSON lines, TensorBoard, Weights & Biases, MLflow, Trackio, SwanLab,
and classes of the user.

Each sink imports its library when it is built.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rich import box
from rich.table import Table
from rich.text import Text

from ctrl_megatron.config.import_path import import_callable
from ctrl_megatron.errors import (
    UserError,
    convert_input_errors,
    convert_user_code_errors,
    name_file_in_errors,
)
from ctrl_megatron.metrics.display import Display, format_number
from ctrl_megatron.metrics.json_lines import JsonlWriter

_FIRST_ROWS = ("reward", "actor")
_NOT_IN_WANDB_IDS = re.compile(r"[:;,#?/'%\\]")
_NOT_IN_SWANLAB_IDS = re.compile(r"[^\w.-]")


class Sink(Protocol):
    """A destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of step ``step``; a step may be logged in several parts."""

    def close(self) -> None:
        """Write everything and close files and connections."""


@runtime_checkable
class ExampleSink(Protocol):
    """A sink that also shows examples."""

    def show(self, step: int, examples: Sequence[Mapping[str, Any]]) -> None:
        """Record examples of step ``step``: fields in the order of display."""


def build_sinks(
    names: Sequence[str], run_dir: Path, config: Mapping[str, Any], display: Display | None = None
) -> list[Sink]:
    """The sinks called ``names`` for a run in ``run_dir``; call it on one rank only.

    ``config`` is the configuration as nested dicts (its ``trainer`` group names project and run). A
    name with a colon is the import path of a class (``load_user_sink_class``). Raises UserError for
    a library that is not installed, and for a class that cannot be built.
    """
    kinds: dict[str, Callable[[], Sink]] = {
        "console": lambda: ConsoleSink(display or Display(0)),
        "jsonl": lambda: JsonlSink(run_dir / "metrics.jsonl"),
        "tensorboard": lambda: TensorboardSink(run_dir / "tensorboard"),
        "wandb": lambda: WandbSink(run_dir, config),
        "mlflow": lambda: MlflowSink(run_dir, config),
        "trackio": lambda: TrackioSink(config),
        "swanlab": lambda: SwanlabSink(run_dir, config),
    }
    sinks: list[Sink] = []
    for name in dict.fromkeys(names):
        try:
            if ":" in name:
                sinks.append(UserSink(name, run_dir, config))
            else:
                sinks.append(kinds[name]())
        except BaseException as error:
            for sink in sinks:
                sink.close()
            if not isinstance(error, ImportError) or isinstance(error, UserError):
                raise
            raise UserError(
                f"trainer.logger names {name}, which is not installed; "
                f"pip install {name} or remove it from the list"
            ) from error
    return sinks


class ConsoleSink:
    """Prints the metrics of a step, one row per group (the part of the name before the slash)."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._display.console.print(step_table(step, self._display.total_steps, metrics))

    def close(self) -> None:
        """Nothing to close; the display belongs to the caller."""


def step_table(step: int, total_steps: int, metrics: Mapping[str, float]) -> Table:
    """The metrics of one step as a table that wraps to any width."""
    groups: dict[str, Text] = {}
    for name, value in metrics.items():
        group, _, rest = name.rpartition("/")
        text = groups.setdefault(group, Text())
        if text:
            text.append("  ")
        # No-break spaces keep a name and its number together when the row wraps.
        text.append(f"{rest}\u00a0", style="dim").append(format_number(value), style="bold")
    title = f"step {step}/{total_steps}" if total_steps else f"step {step}"
    table = Table(title=title, box=box.ROUNDED, show_header=False, title_justify="left")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    first = [group for group in _FIRST_ROWS if group in groups]
    for group in (*first, *sorted(set(groups) - set(first))):
        table.add_row(group, groups[group])
    return table


class JsonlSink:
    """``{"step": int, "metrics": {name: number}}``, one line per call, written at once."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonlWriter(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._lines.append({"step": step, "metrics": dict(metrics)})

    def close(self) -> None:
        self._lines.close()


class TensorboardSink:
    """TensorBoard events, written by the tensorboard package alone."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        self._events, self._summaries, self._tensors = event_pb2, summary_pb2, tensor_pb2
        self._text = create_summary_metadata(display_name="", description="")
        # Not through tensorboard's EventFileWriter, whose thread would meet a full disk.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._path, self._started = directory / name, False
        self._writer = RecordWriter(self._path.open("wb"))
        self._add(0, file_version="brain.Event:2")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._started:
            # A resumed run repeats steps; TensorBoard then drops later events of the first attempt.
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(step, session_log=start)
            self._started = True
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
        ]
        self._add(step, summary=self._summaries.Summary(value=values))

    def show(self, step: int, examples: Sequence[Mapping[str, Any]]) -> None:
        """Write the examples as texts, one card per position in the list."""
        values = []
        for number, example in enumerate(examples, start=1):
            parts = (
                f"**{name}**\n\n    " + str(v).replace("\n", "\n    ")
                for name, v in example.items()
            )
            text = "\n\n".join(parts).encode(errors="backslashreplace")
            values.append(
                self._summaries.Summary.Value(
                    tag=f"examples/{number}",
                    metadata=self._text,
                    tensor=self._tensors.TensorProto(dtype="DT_STRING", string_val=[text]),
                )
            )
        self._add(step, summary=self._summaries.Summary(value=values))

    def close(self) -> None:
        with name_file_in_errors(self._path):
            self._writer.close()

    def _add(self, step: int, **content: object) -> None:
        event = self._events.Event(wall_time=time.time(), step=step, **content)
        with name_file_in_errors(self._path):
            self._writer.write(event.SerializeToString())
            self._writer.flush()


class WandbSink:
    """Weights & Biases: one run, resumed under the same id when the training resumes."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        import wandb  # type: ignore[import-not-found]  # optional

        trainer = config["trainer"]
        self._run = wandb.init(
            project=trainer["project_name"],
            name=trainer["experiment_name"],
            id=_NOT_IN_WANDB_IDS.sub("-", trainer["experiment_name"]),
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()


class MlflowSink:
    """MLflow: one run per start, the configuration as an artifact."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        import mlflow  # type: ignore[import-not-found]  # optional

        self._mlflow = mlflow
        trainer = config["trainer"]
        mlflow.set_experiment(trainer["project_name"])
        mlflow.start_run(run_name=trainer["experiment_name"])
        mlflow.log_dict(dict(config), "config.yaml")
        mlflow.set_tag("run_dir", str(run_dir))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class TrackioSink:
    """Trackio: one run, which goes on under its name when the training resumes. UserError for a
    project's name that Trackio refuses."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        import trackio  # type: ignore[import-not-found]  # optional

        trainer = config["trainer"]
        with convert_input_errors("trainer.project_name"):
            self._run = trackio.init(
                project=trainer["project_name"],
                name=trainer["experiment_name"],
                resume="allow",
                config=dict(config),
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Wait, at most half a minute, until everything is sent."""
        self._run.finish()


class SwanlabSink:
    """SwanLab: one run, resumed under the same id when the training resumes. UserError for a
    project's name that SwanLab refuses."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        import swanlab  # type: ignore[import-not-found]  # optional

        trainer = config["trainer"]
        with convert_input_errors("trainer.project_name"):
            self._run = swanlab.init(
                project=trainer["project_name"],
                name=trainer["experiment_name"],
                id=_NOT_IN_SWANLAB_IDS.sub("-", trainer["experiment_name"]),
                resume="allow",
                log_dir=str(run_dir / "swanlab"),
                config=dict(config),
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()


class UserSink:
    """A sink of the user's; its exceptions name ``trainer.logger`` and the line."""

    def __init__(self, name: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        made = load_user_sink_class(name)
        self._said = f"trainer.logger: {name}"
        with convert_user_code_errors(self._said):
            self._sink: Sink = made(run_dir, config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with convert_user_code_errors(self._said):
            self._sink.log(step, metrics)

    def close(self) -> None:
        with convert_user_code_errors(self._said):
            self._sink.close()


def load_user_sink_class(path: str) -> Callable[[Path, Mapping[str, Any]], Sink]:
    """The class at ``module:Class`` or ``FILE.py:Class``, which is called with the run's directory
    and the configuration as nested dicts, and has the methods of ``Sink``.

    Raises UserError for a path that leads to no class, and for a class without one of the methods.
    """
    with convert_user_code_errors(f"trainer.logger: cannot import {path!r}"):
        found: Any = import_callable(path, "trainer.logger")
    missing = [name for name in ("log", "close") if not callable(getattr(found, name, None))]
    if not isinstance(found, type) or missing:
        lacks = f"has no method {' and no '.join(missing)}" if missing else "is no class"
        raise UserError(
            f"{path!r} {lacks}",
            key="trainer.logger",
            remedy="name a class with __init__(self, run_dir, config), log(self, step, metrics) "
            "and close(self)",
        )
    return found
