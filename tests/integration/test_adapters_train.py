"""Runs that train adapters: the objective's reference is the actor without them."""

from __future__ import annotations

from forked_run import run_forked
from launched_run import Job

LORA = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.lora_alpha=8",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.use_kl_loss=true",
)


def test_adapters_are_trained_and_merged_into_what_engines_get(job: Job) -> None:
    """Every push compares checksums with the merged weights. The reference needs no second model,
    and begins equal to the actor; a resume continues from the adapters."""
    run = run_forked(job, "merged", steps=2, extra=LORA)
    assert run.codes == (0, 0), run.output[-6000:]
    further = run_forked(job, "merged", steps=3, extra=LORA)
    assert further.codes == (0, 0), further.output[-6000:]
    steps = [record["metrics"] for record in further.metrics()]
    assert len(steps) == 3
    assert abs(steps[0]["actor/kl_loss"]) < 1e-6 < steps[2]["actor/kl_loss"]
    assert max(metrics["rollout/probs_diff_max"] for metrics in steps) < 1e-4
