"""Fine-tuning of a masked-diffusion model: a start made from a Llama learns to fill its canvas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_run import run_forked
from golden_runs import sft_examples
from launched_run import Job

from ctrl_megatron.checkpoint.diffusion_start import hf_to_masked_diffusion


def steps_of(job: Job, name: str, steps: int, *extra: str) -> list[dict[str, Any]]:
    run = run_forked(job, name, steps=steps, extra=extra, purpose="sft")
    assert run.codes == (0, 0), run.output[-8000:]
    return [record["metrics"] for record in run.metrics()]


@pytest.mark.long
def test_a_start_learns_and_a_resume_draws_the_same_masks(job: Job, tmp_path: Path) -> None:
    start = tmp_path / "start"
    hf_to_masked_diffusion(job.actor, start, mask_token="<|mask|>")
    rows = sft_examples(tmp_path / "sft.parquet")
    given = (
        *(f"sft.train_files={rows}", f"sft.val_files={rows}", "sft.canvas=40"),
        *("sft.lr=3e-3", "sft.lr_scheduler_type=constant"),
    )
    dream = replace(job, actor=start)
    whole = steps_of(dream, "whole", 60, *given)
    steps_of(dream, "resumed", 20, *given)
    resumed = steps_of(dream, "resumed", 60, *given)
    losses, again = (
        [metrics["sft/loss"] for metrics in run if "sft/loss" in metrics]
        for run in (whole, resumed)
    )
    assert len(losses) == 60 and losses == again
    assert whole[-1]["val/nll"] < 0.2 * losses[0]
    assert all("sft/entropy" not in metrics for metrics in whole)


def test_a_canvas_needs_a_masked_diffusion_model(job: Job, tmp_path: Path) -> None:
    rows = sft_examples(tmp_path / "sft.parquet")
    run = run_forked(
        *(job, "refused"),
        steps=1,
        extra=(f"sft.train_files={rows}", "sft.canvas=40"),
        purpose="sft",
    )
    assert set(run.codes) != {0}
    assert "is no masked-diffusion model, whose responses fill a canvas" in run.output
