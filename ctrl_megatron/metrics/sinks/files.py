"""Sinks that write below the run's directory: JSON lines and TensorBoard events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from ctrl_megatron.metrics.json_lines import JsonLines


class JsonlSink:
    """``{"step": int, "metrics": {name: number}}``, one line per step, flushed at once."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        self._lines.append({"step": step, "metrics": dict(metrics)})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class TensorboardSink:
    """TensorBoard events, written by the tensorboard package alone."""

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ValueError(
                "trainer.logger names tensorboard, which is not installed; "
                "pip install tensorboard or remove it from the list"
            ) from error
        directory.mkdir(parents=True, exist_ok=True)
        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(directory))
        self._started = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event that holds all metrics, and flush."""
        if not self._started:
            # A resumed run repeats steps; this tells TensorBoard to drop what came after them.
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(step, session_log=start)
            self._started = True
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
        ]
        self._add(step, summary=self._summaries.Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def _add(self, step: int, **content: object) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))
