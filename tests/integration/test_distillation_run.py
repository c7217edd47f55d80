"""Runs that learn from a teacher beside the rewards: resumed, and with the teacher elsewhere."""

from __future__ import annotations

import json

import pytest
from forked_run import ForkedRun, run_forked
from launched_run import Job

pytestmark = pytest.mark.timeout(900)

KEYS = "algorithm.distillation."
TAUGHT = (f"{KEYS}teacher=policy", f"{KEYS}top_k=5", "algorithm.filter_groups.enable=false")


def metrics_of(run: ForkedRun) -> dict[int, dict[str, float]]:
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["metrics"] for record in map(json.loads, lines)}


def lasting(metrics: dict[str, float]) -> dict[str, float]:
    """What does not depend on the clock or the machine."""
    changing = ("time/", "perf/", "memory/", "sync/", "checkpoint/", "sandbox/", "engine/")
    changing += ("reward/cached_rate",)
    return {name: value for name, value in metrics.items() if not name.startswith(changing)}


def finished(job: Job, name: str, *extra: str, steps: int = 3, ranks: int = 2) -> ForkedRun:
    run = run_forked(job, name, steps=steps, extra=extra, ranks=ranks)
    assert run.codes == (0,) * ranks, run.output[-8000:]
    return run


def test_a_run_with_a_hinted_teacher_resumes_exactly(job: Job) -> None:
    whole = metrics_of(finished(job, "taught", *TAUGHT, "trainer.save_freq=2"))
    for step in whole.values():
        assert step["actor/divergence"] > 0
        assert step["distillation/row_rate"] == 1
        assert step["distillation/left_out_rate"] == 0
    finished(job, "taught_parts", *TAUGHT, "trainer.save_freq=2", steps=2)
    again = metrics_of(finished(job, "taught_parts", *TAUGHT, "trainer.save_freq=2"))
    for step in whole:
        assert lasting(again[step]) == lasting(whole[step]), step
