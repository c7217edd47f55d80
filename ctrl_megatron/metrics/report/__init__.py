"""One HTML page about a run or several, made from the files the run wrote; opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctrl_megatron.errors import UserError
from ctrl_megatron.metrics.report.document import write_page
from ctrl_megatron.metrics.report.run_files import read_run_files


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` from the run's files and return its path.

    Reads metrics.jsonl, timeline.jsonl, examples.jsonl, summary.json, warnings.jsonl and
    config.yaml; where one is missing the page says "not recorded". Raises ValueError where
    ``run_dir`` holds none of them or a file is malformed. A reader of an older report never sees
    half of the new one.
    """
    from ctrl_megatron.metrics.report.page import render  # imports matplotlib

    target = run_dir / "report.html"
    write_page(target, render(read_run_files(run_dir)))
    return target


def write_comparison(run_dirs: Sequence[Path], target: Path) -> None:
    """Write a page on which two to four runs stand side by side.

    Raises ``UserError`` for another number of runs, and as ``write_report`` does.
    """
    from ctrl_megatron.metrics.report.page import render_comparison  # imports matplotlib

    if not 2 <= len(run_dirs) <= 4:
        raise UserError(f"{len(run_dirs)} runs: two to four can stand side by side")
    runs = [read_run_files(directory) for directory in run_dirs]
    if len({run.name for run in runs}) < len(runs):
        raise UserError("two of the runs have one name: name each directory once")
    write_page(target, render_comparison(runs))


__all__ = ["write_comparison", "write_report"]
