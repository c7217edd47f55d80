"""One HTML page about a run, made from the files the run wrote; opens offline."""

from __future__ import annotations

import os
from pathlib import Path

from ctrl_megatron.metrics.report.run_files import read_run_files


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` from the run's files and return its path.

    Reads metrics.jsonl, timeline.jsonl, examples.jsonl, summary.json and config.yaml; where one is
    missing the page says "not recorded". Raises ValueError where ``run_dir`` holds none of them or
    a file is malformed. A reader of an older report never sees half of the new one.
    """
    from ctrl_megatron.metrics.report.page import render  # imports matplotlib

    html = render(read_run_files(run_dir))
    target = run_dir / "report.html"
    partial = run_dir / f".report.html.{os.getpid()}"
    try:
        partial.write_text(html, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target


__all__ = ["write_report"]
