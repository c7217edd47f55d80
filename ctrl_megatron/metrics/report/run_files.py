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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """The phases of one step on one rank."""

    step: int
    rank: int
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The content of a run's directory; None where a file does not exist."""

    name: str
    """Name of the run, which is the name of its directory."""
    series: Series | None
    timelines: list[StepTimeline] | None
    examples: list[dict[str, Any]] | None
    summary: list[dict[str, Any]] | None
    """Rows of the final table."""
    config: str | None
    """The configuration as YAML text."""


def read_run_files(run_dir: Path) -> RunFiles:
    """Read every file the report needs. Raises ValueError where none exists or one is malformed."""
    found = {name: run_dir / name for name in _NAMES if (run_dir / name).is_file()}
    if not found:
        raise ValueError(f"{run_dir} holds none of {', '.join(_NAMES)}; is it a run's directory?")
    metrics, timeline = found.get("metrics.jsonl"), found.get("timeline.jsonl")
    examples, summary = found.get("examples.jsonl"), found.get("summary.json")
    config = found.get("config.yaml")
    return RunFiles(
        name=run_dir.resolve().name,
        series=None if metrics is None else _series(metrics),
        timelines=None if timeline is None else _timelines(timeline),
        examples=None if examples is None else read_json_lines(examples),
        summary=None if summary is None else _summary(summary),
        config=None if config is None else config.read_text(encoding="utf-8"),
    )


def _series(path: Path) -> Series:
    # A resumed run writes some steps again; the later line is what the weights really saw.
    steps = {
        int(_field(r, "step", path)): _field(r, "metrics", path) for r in read_json_lines(path)
    }
    series: Series = {}
    for step, metrics in sorted(steps.items()):
        for name, value in metrics.items():
            series.setdefault(name, []).append((step, float(value)))
    return series


def _timelines(path: Path) -> list[StepTimeline]:
    newest: dict[tuple[int, int], StepTimeline] = {}
    for record in read_json_lines(path):
        phases = tuple(
            Phase(p["name"], p["kind"], float(p["start"]), float(p["end"]))
            for p in _field(record, "phases", path)
        )
        step, rank = int(_field(record, "step", path)), int(_field(record, "rank", path))
        newest[step, rank] = StepTimeline(step=step, rank=rank, phases=phases)
    return [newest[key] for key in sorted(newest)]


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
