"""The printed configurations of CTRL, siiRL and DiffuCoder train a step: only paths, sizes and what
a machine without a GPU lacks are other.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import golden_runs
import pytest
from forked_run import run_forked
from launched_run import Job

pytestmark = pytest.mark.timeout(600)

KEPT = ("actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.entropy_coeff")
"""Settings of a test's job in whose place the printed ones stay."""
SMALL = ("trainer.n_gpus_per_node=1", "trainer.logger=[jsonl]")
BLOCKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ctrl": ((), KEPT),
    "siirl": (
        (
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "reward.reward_funcs=[foreign_pipeline:brevity]",
        ),
        (*KEPT, *golden_runs.NO_PROGRAMS),
    ),
    "diffucoder": (
        (
            *("actor_rollout_ref.rollout.name=diffusion", "diffusion_steps=3"),
            *("max_completion_length=8", "reward_funcs=[diffusion_rewards:variety]"),
            *("reward_weights=[1.0]", "num_generations=4", "data.train_batch_size=4"),
            *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.max_prompt_length=256"),
        ),
        (
            *(*KEPT, *golden_runs.NO_PROGRAMS, "actor_rollout_ref.rollout.name"),
            *("data.max_response_length", "actor_rollout_ref.rollout.n"),
        ),
    ),
}
"""Format -> settings, and settings of the job that are left out."""


@pytest.mark.parametrize(
    "form",
    [pytest.param(n, marks=pytest.mark.long) if n == "diffucoder" else n for n in BLOCKS],
)
def test_a_printed_configuration_trains_a_step(job: Job, form: str, tmp_path: Path) -> None:
    settings, without = BLOCKS[form]
    if form == "diffucoder":
        job = golden_runs.STARTS["denoiser"](job, tmp_path)
    job = replace(job, folder=tmp_path / "runs")
    run = run_forked(
        job,
        form,
        steps=1,
        extra=(*golden_runs.DRAWN[1:], *SMALL, *settings),
        without=without,
        ranks=1,
        config=f"examples/guide/{form}.yaml",
    )
    assert run.codes == (0,), run.output[-8000:]
    (step,) = run.metrics()
    assert step["metrics"]["actor/grad_norm"] > 0
