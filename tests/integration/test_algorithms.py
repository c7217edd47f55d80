"""Algorithms train for five steps from one line of configuration; the recorded ones in
``test_golden``.
"""

from __future__ import annotations

import math

import pytest
from forked_run import run_forked
from launched_run import Job

pytestmark = pytest.mark.timeout(900)

ACTOR = "actor_rollout_ref.actor."
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "gspo": (ACTOR + "policy_loss=gspo", ACTOR + "loss_agg_mode=seq-mean-token-mean"),
    "remax": ("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1"),
    "kl_cov": (
        *(ACTOR + "policy_loss=kl_cov", ACTOR + "kl_cov_ratio=0.1"),
        *("algorithm.adv_estimator=reinforce_plus_plus_baseline", "reward.judge.weight=0.1"),
        "reward.reward_funcs=[critic,binary_code,soft_overlong_punishment]",
        "reward.reward_weights=[1.0,0.5,0.0]",
        "reward.reward_options.soft_overlong_punishment={max_length: 16, cache_length: 16}",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_five_steps(job: Job, name: str) -> None:
    run = run_forked(job, name, steps=5, extra=ALGORITHMS[name])
    assert run.codes == (0, 0), run.output[-8000:]
    assert [record["step"] for record in run.metrics()] == [1, 2, 3, 4, 5]
    metrics = [record["metrics"] for record in run.metrics()]
    assert all(math.isfinite(value) for step in metrics for value in step.values())
    assert all(step["actor/grad_norm"] > 0 for step in metrics)
    assert all(step["rollout/probs_diff_mean"] < 1e-4 for step in metrics)
    if name == "kl_cov":
        assert_sum_of_rewards(metrics)


def assert_sum_of_rewards(metrics: list[dict[str, float]]) -> None:
    for step in metrics:
        # One test per problem: its pass rate is 0 or 1.
        assert step["reward/binary_code"] == step["reward/mean"]
        assert step["reward/soft_overlong_punishment"] < 0, "of weight 0, but reported"
        total = 1.5 * step["reward/mean"] + 0.1 * step["reward/judge"]
        assert step["reward/total"] == pytest.approx(total)


def test_filtering_everything_is_an_error_that_says_what_to_change(job: Job) -> None:
    extra = (
        *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2"),
        # So rare are other tokens at this temperature that all critiques of a prompt are equal.
        "actor_rollout_ref.rollout.temperature=1e-4",
    )
    run = run_forked(job, "nothing_left", steps=2, extra=extra)
    assert set(run.codes) == {2}
    said = run.output
    assert "Traceback" not in said
    assert "after 2 batches of 4 prompts only 0 groups had different rewards" in said
    assert "algorithm.filter_groups.max_num_gen_batches" in said
