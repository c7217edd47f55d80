"""Coupled GRPO on a start made from a Llama: it trains, resumes, and its reference follows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from forked_run import ForkedRun, run_forked
from launched_run import Job

from ctrl_megatron.checkpoint.diffusion_start import make_diffusion_start

pytestmark = pytest.mark.timeout(600)
COUPLED = (
    "dag.custom_pipeline_fn=ctrl_megatron.pipeline:coupled_grpo_pipeline",
    *("actor_rollout_ref.rollout.name=diffusion", "data.max_response_length=8"),
    *("reward.reward_funcs=[diffusion_rewards:variety]", "algorithm.adv_estimator=rloo"),
    *("actor_rollout_ref.rollout.engine_kwargs={steps: 3}", "data.max_prompt_length=256"),
)
TWICE = (
    *("actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
    "actor_rollout_ref.actor.clip_ratio=0.5",
    *("actor_rollout_ref.ref.sync_steps=2", "actor_rollout_ref.ref.sync_mix=0.5"),
)
UNREAD = (
    *("actor_rollout_ref.proxy.model.path", "actor_rollout_ref.rollout.revision_max_tokens"),
    "sandbox.workers",
)


@pytest.fixture(scope="module")
def dream(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Job:
    start = tmp_path_factory.mktemp("dream") / "start"
    make_diffusion_start(job.actor, start, mask_token="<|mask|>")
    return replace(job, actor=start)


def ran(job: Job, name: str, steps: int, *extra: str, ranks: int = 1) -> ForkedRun:
    run = run_forked(
        job, name, steps=steps, extra=(*COUPLED, *extra), without=UNREAD, draws=True, ranks=ranks
    )
    assert run.codes == (0,) * ranks, run.output[-8000:]
    return run


def test_a_step_trains_and_is_reported(dream: Job) -> None:
    run = ran(dream, "coupled", 1, "trainer.n_gpus_per_node=1")
    (metrics,) = (record["metrics"] for record in run.metrics())
    assert metrics["actor/grad_norm"] > 0 and metrics["actor/ppo_kl_first"] == 0
    assert not any(name.startswith("rollout/") for name in metrics)
    assert (run.folder / "report.html").is_file()


@pytest.mark.long
def test_three_steps_on_two_ranks_resume_exactly_and_the_reference_follows(dream: Job) -> None:
    whole = ran(dream, "coupled_whole", 3, *TWICE, ranks=2)
    ran(dream, "coupled_cut", 2, *TWICE, ranks=2)
    cut = ran(dream, "coupled_cut", 3, *TWICE, ranks=2)
    steps, again = ([r["metrics"] for r in run.metrics()] for run in (whole, cut))
    assert len(steps) == len(again) == 3
    for one, other in zip(steps, again, strict=True):
        for name in ("actor/loss", "actor/kl_loss", "actor/grad_norm", "reward/mean"):
            assert one[name] == other[name], name
        # The second pass has masks of its own, which the old scores share.
        assert abs(one["actor/ppo_kl_first"]) < 1e-6 < abs(one["actor/ppo_kl"])
    # Passes are packed in ways of their own, which round in ways of their own.
    assert steps[0]["actor/kl_to_reference"] < 1e-6 < steps[1]["actor/kl_to_reference"]
    folder = whole.folder / "checkpoints/global_step_3"
    assert (folder / "reference").is_dir() and (folder / "policy").is_dir()
    assert "Reward" in (whole.folder / "report.html").read_text()
