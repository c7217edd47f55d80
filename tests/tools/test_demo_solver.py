"""What ``tools/demo_solver.py`` reads from a run."""

from __future__ import annotations

import json
from pathlib import Path

from tools.demo_solver import compared, rewards_of


def test_a_step_that_was_made_anew_counts_once(tmp_path: Path) -> None:
    assert rewards_of(tmp_path) == []
    steps = [(1, 0.5), (2, 0.125), (3, 0.25), (2, 0.375), (3, 1.0), (4, 0.75)]
    lines = [json.dumps({"step": n, "metrics": {"reward/mean": r}}) for n, r in steps]
    lines.append(json.dumps({"step": 4, "metrics": {"val/reward/code": 0.1, "reward/mean": 0.75}}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert rewards_of(tmp_path) == [0.5, 0.375, 1.0, 0.75]


def test_the_first_steps_are_compared_with_the_last() -> None:
    assert compared([0.0, 1.0, 0.0, 1.0, 0.5, 9.0, 1.0, 1.0, 1.0, 1.0, 0.5]) == (0.5, 0.9)
