"""Validation may draw several texts of every row: the same ones each time, and pass@K of them."""

from __future__ import annotations

from pathlib import Path

import golden_runs
import pytest
from forked_run import run_forked
from launched_run import Job

pytestmark = pytest.mark.timeout(600)

VALUES = "actor_rollout_ref.rollout.val_kwargs"
DRAWS = (f"{VALUES}.n=4", f"{VALUES}.temperature=1.3", f"{VALUES}.top_k=8")


@pytest.mark.parametrize("pipeline", ["ctrl", pytest.param("grpo", marks=pytest.mark.long)])
def test_several_draws_of_every_row(job: Job, pipeline: str, tmp_path: Path) -> None:
    grpo = ("dag.custom_pipeline_fn=ctrl_megatron.pipeline:grpo_pipeline",)
    settings, without = (grpo, golden_runs.NO_REVISIONS) if pipeline == "grpo" else ((), ())
    if pipeline == "grpo":
        settings += ("reward.reward_funcs=[code]", "data.max_response_length=48")
        job = golden_runs.STARTS["solver"](job, tmp_path)
    validation = (
        f"data.val_files={job.data}",
        "trainer.test_freq=1",
        "trainer.val_before_train=true",
    )
    run = run_forked(
        job,
        f"draws_{pipeline}",
        steps=1,
        extra=(*settings, *DRAWS, *validation, "actor_rollout_ref.actor.optim.lr=1e-30"),
        without=without,
    )
    assert run.codes == (0, 0), run.output[-8000:]
    rates = (
        {name: value for name, value in record["metrics"].items() if name.startswith("val/")}
        for record in run.metrics()
    )
    before, after = (one for one in rates if one)
    assert before == after
    assert 0 < after["val/pass@4"] <= 1
    if pipeline == "grpo":
        assert 0 < after["val/reward/code"] < after["val/pass@4"]
    else:
        assert after["val/solved_after"] <= after["val/pass@4"]
        assert after["val/rounds"] == 4 * 8
