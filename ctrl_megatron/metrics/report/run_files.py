"""What a run left on disk, read for the report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctrl_megatron.metrics.json_lines import read_json_lines
from ctrl_megatron.metrics.timeline import Phase

_NAMES = ("metrics.jsonl", "timeline.jsonl", "examples.jsonl", "summary.json", "config.yaml")
Series = dict[str, list[tuple[int, float]]]
"""For every metric its (step, value) points by step."""
Timelines = dict[tuple[int, int], list[Phase]]
"""The phases by step and rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The content of a run's directory; None where a file does not exist."""

    name: str
    """Name of the run, which is the name of its directory."""
    series: Series | None
    timelines: Timelines | None
    examples: list[dict[str, Any]] | None
    """In the order of steps, each ``{"step": int, field: value, ...}`` in the order of display."""
    summary: list[dict[str, Any]] | None
    """Rows of the final table."""
    config: str | None
    """The configuration as YAML text."""


def read_run_files(run_dir: Path) -> RunFiles:
    """Read every file the report needs. Raises ValueError where none exists or one is malformed."""
    files = {name: run_dir / name for name in _NAMES if (run_dir / name).is_file()}
    if not files:
        raise ValueError(f"{run_dir} holds none of {', '.join(_NAMES)}; is it a run's directory?")
    metrics, timeline = files.get("metrics.jsonl"), files.get("timeline.jsonl")
    examples, summary = files.get("examples.jsonl"), files.get("summary.json")
    config = files.get("config.yaml")
    return RunFiles(
        name=run_dir.resolve().name,
        series=None if metrics is None else _series(metrics),
        timelines=None if timeline is None else _timelines(timeline),
        examples=None if examples is None else _examples(examples),
        summary=None if summary is None else _summary(summary),
        config=None if config is None else config.read_text(encoding="utf-8"),
    )


def _series(path: Path) -> Series:
    # A step is logged in parts (training, then validation), and a resumed run logs some steps
    # again: what was logged last counts, for every metric on its own.
    values: dict[str, dict[int, float]] = {}
    for record in read_json_lines(path):
        step = int(_field(record, "step", path))
        for name, value in _field(record, "metrics", path).items():
            values.setdefault(name, {})[step] = float(value)
    return {name: sorted(points.items()) for name, points in values.items()}


def _timelines(path: Path) -> Timelines:
    timelines: Timelines = {}
    for record in read_json_lines(path):
        step, rank, phases = (_field(record, name, path) for name in ("step", "rank", "phases"))
        timelines[int(step), int(rank)] = [
            Phase(p["name"], p["kind"], float(p["start"]), float(p["end"])) for p in phases
        ]
    return timelines


def _examples(path: Path) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for record in read_json_lines(path):
        step = int(_field(record, "step", path))
        if kept and step < kept[-1]["step"]:
            # A resumed run went back: what had come after its checkpoint is not its past.
            kept = [example for example in kept if example["step"] < step]
        kept.append({**record, "step": step})
    return kept


def _summary(path: Path) -> list[dict[str, Any]]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))["table"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f'{path} must be JSON of the form {{"table": [rows]}}') from error
    if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
        raise ValueError(f"{path}: every row of the table must be an object")
    return table


def _field(record: dict[str, Any], name: str, path: Path) -> Any:
    if name not in record:
        raise ValueError(f"{path}: a line without the field {name!r}: {str(record)[:80]}")
    return record[name]
