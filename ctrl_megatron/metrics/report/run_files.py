"""The files of a run that its report shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctrl_megatron.errors import UserError, read_json, read_text
from ctrl_megatron.metrics.json_lines import incomplete_last_line, read_json_lines
from ctrl_megatron.metrics.timeline import Phase

Series = dict[str, list[tuple[int, float]]]
"""Metric -> (step, value) points in the order of steps."""
Timelines = dict[tuple[int, int], list[Phase]]
"""(step, rank) -> phases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The content of a run's directory; None where a file does not exist."""

    name: str
    """Name of the run, which is the name of its directory."""
    series: Series | None = None
    timelines: Timelines | None = None
    examples: list[dict[str, Any]] | None = None
    """Examples in the order of steps, each ``{"step": int, field: value, ...}`` in the order of
    display."""
    summary: list[dict[str, Any]] | None = None
    """Rows of the run's final table."""
    warnings: list[dict[str, Any]] | None = None
    """Every warning of every step: ``{"step": int, "warning": name, "text": str}``."""
    graph: list[dict[str, Any]] | None = None
    """The nodes of a step (``graph.picture.describe_nodes``)."""
    config: str | None = None
    """The configuration as YAML text."""
    written: float | None = None
    """Time of the newest file, in seconds since the epoch."""
    left_out: tuple[str, ...] = ()
    """A sentence for every file that is missing and for every line that cannot be read."""


def read_run_files(run_dir: Path) -> RunFiles:
    """Read the files of a run. Raises ValueError where none exists or one is malformed."""
    readers: dict[str, tuple[str, Callable[[Path], Any]]] = {
        "metrics.jsonl": ("series", _series),
        "timeline.jsonl": ("timelines", _timelines),
        "examples.jsonl": ("examples", _past),
        "summary.json": ("summary", _summary),
        "warnings.jsonl": ("warnings", _warnings),
        "graph.json": ("graph", read_json),
        "config.yaml": ("config", read_text),
    }
    there = {file: run_dir / file for file in readers if (run_dir / file).is_file()}
    if not there:
        raise UserError(f"{run_dir} has none of {', '.join(readers)}; is it a run's directory?")
    contents = {readers[file][0]: readers[file][1](path) for file, path in there.items()}
    # Most runs have no warnings, and runs of earlier versions no graph.
    usual = [file for file in readers if file not in ("warnings.jsonl", "graph.json")]
    left_out = [f"{f}: not recorded" for f in usual if not contents.get(readers[f][0])]
    cut = {path: incomplete_last_line(path) for path in there.values() if path.suffix == ".jsonl"}
    left_out += [f"{path.name}: line {n} is cut off and left out" for path, n in cut.items() if n]
    return RunFiles(
        name=run_dir.resolve().name,
        written=max(path.stat().st_mtime for path in there.values()),
        left_out=tuple(left_out),
        **contents,
    )


def _series(path: Path) -> Series:
    # A step is logged in parts (training, then validation), and a resumed run logs some steps
    # again. The last value counts, for every metric separately.
    values: dict[str, dict[int, float]] = {}
    last = -1
    for record in read_json_lines(path):
        step = int(_field(record, "step", path))
        if step < last:
            # Values of this step stay: a checkpoint may be validated once more.
            values = {n: {s: v for s, v in of.items() if s <= step} for n, of in values.items()}
        last = step
        for name, value in _field(record, "metrics", path).items():
            values.setdefault(name, {})[step] = float(value)
    return {name: sorted(points.items()) for name, points in values.items() if points}


def _timelines(path: Path) -> Timelines:
    timelines: Timelines = {}
    for record in _past(path):
        rank, phases = (_field(record, name, path) for name in ("rank", "phases"))
        timelines[record["step"], int(rank)] = [
            Phase(p["name"], p["kind"], float(p["start"]), float(p["end"])) for p in phases
        ]
    return {place: phases for place, phases in timelines.items() if phases}


def _warnings(path: Path) -> list[dict[str, Any]]:
    records = _past(path)
    for record in records:
        for name in ("warning", "text"):
            _field(record, name, path)
    return records


def _past(path: Path) -> list[dict[str, Any]]:
    """The records in the order of steps, without those that a resumed run replaced."""
    kept: list[dict[str, Any]] = []
    for record in read_json_lines(path):
        step = int(_field(record, "step", path))
        if kept and step < kept[-1]["step"]:
            # The run resumed from an older checkpoint: later records are not part of it.
            kept = [one for one in kept if one["step"] < step]
        kept.append({**record, "step": step})
    return kept


def _summary(path: Path) -> list[dict[str, Any]]:
    try:
        table = read_json(path)["table"]
    except (KeyError, TypeError) as error:
        raise UserError(f'{path} must be JSON of the form {{"table": [rows]}}') from error
    if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
        raise UserError(f"{path}: every row of the table must be an object")
    return table


def _field(record: dict[str, Any], name: str, path: Path) -> Any:
    if name not in record:
        raise UserError(f"{path}: a line without the field {name!r}: {str(record)[:80]}")
    return record[name]
