"""Suspicious metrics cause a warning, and others do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctrl_megatron.errors import UserError
from ctrl_megatron.metrics.report import write_comparison, write_report
from ctrl_megatron.metrics.warnings import WARNINGS, StepWarnings

HEALTHY = {
    "advantage/mean_abs": 0.3,
    "reward/mean": 0.5,
    "reward/judged_rate": 1.0,
    "actor/entropy": 1.0,
    "critique/cut_rate": 0.1,
    "rollout/probs_diff_mean": 0.004,
}
WORRYING = {
    "no_signal": ("advantage/mean_abs", 0.0),
    "saturated": ("reward/mean", 0.99),
    "no_reward": ("reward/mean", 0.0),
    "entropy_collapse": ("actor/entropy", 0.05),
    "cut_responses": ("critique/cut_rate", 0.3),
    "engine_differs": ("rollout/probs_diff_mean", 0.03),
    "not_judged": ("reward/judged_rate", 0.5),
    "unjudgeable": ("reward/unjudgeable_rate", 0.2),
}


def test_every_warning_has_its_example() -> None:
    assert {warning.name for warning in WARNINGS} == set(WORRYING)


@pytest.mark.parametrize("name", WORRYING)
def test_a_suspicious_step_is_reported(name: str) -> None:
    warnings, (metric, value) = StepWarnings(), WORRYING[name]
    assert warnings.check(HEALTHY) == {} and warnings.check({}) == {}
    assert set(warnings.check({**HEALTHY, metric: value})) == {name}
    assert warnings.check({**HEALTHY, metric: float("nan")}) == {}


def test_a_reward_that_rises_while_validation_falls_is_reported() -> None:
    warnings = StepWarnings()

    def told(rewards: list[float], validated: float) -> set[str]:
        for reward in rewards:
            assert warnings.check({"reward/mean": reward}) == {}
        return {*warnings.check({"val/revision_pass_rate": validated})}

    assert StepWarnings().check({"val/revision_pass_rate": 0.1}) == {}  # before any step
    early = StepWarnings()
    early.check({"val/revision_pass_rate": 0.6})
    # The sum counts where there are several rewards.
    for total in (0.2, 0.4):
        early.check({"reward/mean": 0.5, "reward/total": total})
    assert {*early.check({"val/revision_pass_rate": 0.5})} == {"reward_is_gamed"}
    assert told([0.3, 0.3], 0.30) == set()
    assert told([0.4, 0.4], 0.36) == set()  # both rise
    assert told([0.5, 0.5], 0.33) == set()  # within noise
    assert told([0.5, 0.6], 0.30) == {"reward_is_gamed"}
    assert told([0.3, 0.3], 0.30) == set()  # both are lower
    assert told([0.6, 0.6], 0.40) == set()


def run_at(folder: Path, values: list[float]) -> Path:
    folder.mkdir()
    lines = [{"step": n, "metrics": {"reward/mean": v}} for n, v in enumerate(values, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = [{"step": n, "warning": "no_reward", "text": "look at it"} for n in (1, 2)]
    (folder / "warnings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    return folder


def test_the_report_counts_warnings(tmp_path: Path) -> None:
    html = write_report(run_at(tmp_path / "run", [0.0, 0.0])).read_text()
    assert "<td>no reward</td><td>2</td><td>2</td><td>look at it</td>" in html


def test_runs_stand_side_by_side(tmp_path: Path) -> None:
    runs = [run_at(tmp_path / name, [0.1, 0.2]) for name in ("first", "second")]
    write_comparison(runs, tmp_path / "both.html")
    html = (tmp_path / "both.html").read_text()
    assert "first and second" in html and html.count("<img") == 1
    assert "<td>second</td><td>no reward</td><td>2</td>" in html
    with pytest.raises(UserError, match="two to four"):
        write_comparison(runs[:1], tmp_path / "one.html")
