"""Runs whose engines do not compute with what they were sent, although all bytes are right."""

from __future__ import annotations

import pytest
from forked_run import run_forked
from launched_run import Job

FIRST = "trainer.verify_weight_sync=first"
LORA = (
    *("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"),
    *("actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.proxy.kind=engine"),
    *("actor_rollout_ref.proxy.engine.name=hf", "actor_rollout_ref.rollout.adapter_push=true"),
)


@pytest.mark.parametrize(
    ("sender", "extra", "before"),
    [
        ("StaleSender", (), "actor@0"),
        pytest.param(
            *("IgnoredAdapters", LORA, "the model without its adapters"), marks=pytest.mark.long
        ),
    ],
)
def test_a_run_ends_at_the_first_push_that_the_engine_ignores(
    job: Job, sender: str, extra: tuple[str, ...], before: str
) -> None:
    transport = f"actor_rollout_ref.rollout.weight_transport=wrong_senders:{sender}"
    run = run_forked(job, sender, steps=4, extra=(FIRST, transport, *extra))
    assert run.codes != (0, 0)
    assert f"log-probs from {before} to actor@1 its own have" in run.output, run.output[-4000:]
    # The first push had nothing wrong.
    assert len(run.metrics()) == 1


def test_weights_that_stay_the_same_pass(job: Job) -> None:
    """In the first two steps only a value model learns."""
    warmup = "algorithm.adv_estimator=gae", "trainer.critic_warmup=2"
    run = run_forked(job, "unchanged", steps=3, extra=(FIRST, *warmup))
    assert run.codes == (0, 0), run.output[-4000:]
