"""One HTML page about a run or several, made from the files of the run; it opens without
network.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctrl_megatron.errors import UserError
from ctrl_megatron.metrics.report.document import write_page
from ctrl_megatron.metrics.report.run_files import read_run_files


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` from the run's files and return its path.

    Reads metrics.jsonl, timeline.jsonl, examples.jsonl, summary.json, warnings.jsonl and
    config.yaml; the page says which of them are missing. Raises ValueError where ``run_dir`` has
    none of them or a file is malformed. A reader of an older report never sees a part of the new
    one.
    """
    from ctrl_megatron.metrics.report.page import render_report  # imports matplotlib

    target = run_dir / "report.html"
    write_page(target, render_report(read_run_files(run_dir)))
    return target


def write_comparison(run_dirs: Sequence[Path], target: Path) -> None:
    """Write a page that compares two to four runs.

    Raises ``UserError`` for another number of runs, and as ``write_report`` does.
    """
    from ctrl_megatron.metrics.report.page import render_comparison  # imports matplotlib

    if not 2 <= len(run_dirs) <= 4:
        raise UserError(f"{len(run_dirs)} runs: a page compares two to four runs")
    runs = [read_run_files(directory) for directory in run_dirs]
    if len({run.name for run in runs}) < len(runs):
        raise UserError("two of the runs have one name: name each directory once")
    write_page(target, render_comparison(runs))


__all__ = ["write_comparison", "write_report"]
