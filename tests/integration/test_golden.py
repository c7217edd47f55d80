"""Runs with fixed seeds give the recorded losses, norms, rewards and texts (``golden_runs``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import golden_runs
import pytest
from launched_run import Job

from ctrl_megatron.metrics.names import metric_of

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def golden_job(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same models and data as everywhere, in a folder where no other test's runs go on."""
    return replace(job, folder=tmp_path_factory.mktemp("golden") / "runs")


def assert_recorded(name: str, steps: list[dict[str, Any]]) -> None:
    recorded = golden_runs.load(name)
    logged = {metric for step in steps for metric in step["metrics"]}
    assert [metric for metric in sorted(logged) if metric_of(metric) is None] == []
    assert len(steps) == len(recorded["steps"])
    same_machine = recorded["machine"] == golden_runs.machine()
    for number, (found, expected) in enumerate(zip(steps, recorded["steps"], strict=True), 1):
        for example, wanted in zip(found["texts"], expected["texts"], strict=True):
            assert example == wanted, f"{name}, step {number}"
        wanted = expected["metrics"]
        # A run may report more than was recorded, never less.
        metrics = {key: found["metrics"].get(key) for key in wanted}
        if not same_machine:
            wanted = pytest.approx(wanted, **golden_runs.DIFFERENT_MACHINE)
        assert metrics == wanted, f"{name}, step {number}"


@pytest.mark.parametrize("name", golden_runs.RL)
def test_rl(golden_job: Job, name: str) -> None:
    assert_recorded(name, golden_runs.run_rl(golden_job, name, name))


def test_a_resumed_run(golden_job: Job) -> None:
    assert_recorded("ctrl_grpo", golden_runs.run_rl(golden_job, "ctrl_grpo", "resumed", (2,)))


def test_sft(golden_job: Job) -> None:
    assert_recorded("sft", golden_runs.run_sft(golden_job))
