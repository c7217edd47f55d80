"""Algorithms train for five steps from one line of configuration, the common ones with a resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
from forked_run import run_forked
from launched_run import Job

pytestmark = pytest.mark.timeout(900)

ACTOR = "actor_rollout_ref.actor."
IN_REWARD = (ACTOR + "use_kl_loss=false", "algorithm.use_kl_in_reward=true")
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "ppo": (
        "algorithm.adv_estimator=gae",
        *("trainer.critic_warmup=1", "critic.optim.lr=1e-2", "algorithm.kl_ctrl.type=adaptive"),
        *("critic.ppo_epochs=2", *IN_REWARD),
    ),
    "rloo": ("algorithm.adv_estimator=rloo", ACTOR + "ppo_epochs=2"),
    "gspo": (ACTOR + "policy_loss=gspo", ACTOR + "loss_agg_mode=seq-mean-token-mean"),
    "dapo": (
        "algorithm.filter_groups.enable=true",
        *("data.gen_batch_size=6", "actor_rollout_ref.rollout.n=4"),
        *(ACTOR + "clip_ratio_high=0.28", "reward.overlong_buffer.enable=true"),
        *("reward.overlong_buffer.len=8", "algorithm.rollout_correction.rollout_is=token"),
    ),
    "remax": ("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1"),
    "kl_cov": (
        *(ACTOR + "policy_loss=kl_cov", ACTOR + "kl_cov_ratio=0.1"),
        *("algorithm.adv_estimator=reinforce_plus_plus_baseline", "reward.judgment_weight=0.1"),
        "reward.reward_funcs=[critic,binary_code,soft_overlong_punishment]",
        "reward.reward_weights=[1.0,0.5,0.0]",
        "reward.reward_options.soft_overlong_punishment={max_length: 16, cache_length: 16}",
    ),
}


STOPS = {"ppo": (1, 3), "dapo": (3,)}
"""After which steps a run is stopped and resumed; PPO's actor has not learned at the first."""
REPEATABLE = ("actor/", "critic/", "advantage/", "reward/", "critique/", "sampling/")
Metrics = list[dict[str, float]]


@pytest.fixture(scope="module")
def whole(job: Job) -> Callable[[str], Metrics]:
    """Five steps of the algorithm of that name in one run, which runs once."""
    return cache(lambda name: five_steps(job, name, name))


def five_steps(job: Job, name: str, folder: str, stops: tuple[int, ...] = ()) -> Metrics:
    """The metrics of five steps; the run ends after each of ``stops`` and is resumed."""
    for steps in (*stops, 5):
        run = run_forked(job, folder, steps=steps, extra=ALGORITHMS[name])
        assert run.codes == (0, 0), run.output[-8000:]
    assert [record["step"] for record in run.metrics()] == [1, 2, 3, 4, 5]
    return [record["metrics"] for record in run.metrics()]


@pytest.mark.parametrize("name", STOPS)
def test_a_run_that_was_stopped_goes_on_like_one_that_was_not(
    job: Job, whole: Callable[[str], Metrics], name: str
) -> None:
    stopped = five_steps(job, name, f"{name}_stopped", STOPS[name])
    for step, (found, expected) in enumerate(zip(stopped, whole(name), strict=True), start=1):
        wanted = {k: v for k, v in expected.items() if k.startswith(REPEATABLE)}
        # Verdicts are remembered by a process.
        del wanted["reward/cached_rate"]
        assert {k: found[k] for k in wanted} == pytest.approx(wanted, rel=1e-6, abs=1e-9), step


@pytest.mark.parametrize("name", ALGORITHMS)
def test_five_steps(whole: Callable[[str], Metrics], name: str) -> None:
    metrics = whole(name)
    assert all(math.isfinite(value) for step in metrics for value in step.values())
    learning = metrics[1:] if name == "ppo" else metrics
    assert all(step["actor/grad_norm"] > 0 for step in learning)
    if name != "dapo":
        # There, groups of the step before speak with that step's weights.
        assert all(step["rollout/probs_diff_mean"] < 1e-4 for step in metrics)
    check = CHECKS.get(name)
    if check is not None:
        check(metrics)


def ppo(metrics: Metrics) -> None:
    first, *later = metrics
    # The value model learns alone, and expected nothing before.
    assert "actor/grad_norm" not in first and first["critic/grad_norm"] > 0
    assert later[0]["actor/ppo_kl_first"] == 0.0 == later[0]["actor/kl_to_reference"]
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-9)
    assert all(step["critic/explained_variance"] != 0.0 for step in later)
    assert later[-1]["critic/vf_loss"] < first["critic/vf_loss"]
    # The controller is one that adapts: its coefficient moves in every step.
    coefficients = [step["actor/kl_coef"] for step in metrics]
    assert len(set(coefficients)) == 5


def dapo(metrics: Metrics) -> None:
    assert all(step["reward/overlong"] <= 0 for step in metrics)
    assert all(step["sampling/rounds"] <= 10 for step in metrics)
    # What one step leaves over, the next one uses.
    assert any(step["sampling/reserve"] > 0 for step in metrics)
    fresh = [step for step in metrics[1:] if step["rollout/probs_diff_mean"] < 1e-4]
    assert all(step["rollout/ess"] > 0.999 for step in fresh)
    assert metrics[0]["rollout/probs_diff_mean"] < 1e-4


def kl_cov(metrics: Metrics) -> None:
    for step in metrics:
        # One test per problem: its pass rate is 0 or 1.
        assert step["reward/binary_code"] == step["reward/mean"]
        assert step["reward/soft_overlong_punishment"] < 0, "of weight 0, but reported"
        total = 1.5 * step["reward/mean"] + 0.1 * step["reward/judgment"]
        assert step["reward/total"] == pytest.approx(total)


CHECKS = {"ppo": ppo, "dapo": dapo, "kl_cov": kl_cov}


def test_filtering_everything_is_an_error_that_says_what_to_change(job: Job) -> None:
    extra = (
        *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2"),
        # So rare are other tokens at this temperature that all critiques of a prompt are equal.
        "actor_rollout_ref.rollout.temperature=1e-4",
    )
    run = run_forked(job, "nothing_left", steps=2, extra=extra)
    assert 0 not in run.codes
    said = run.output
    assert "after 2 batches of 4 prompts only 0 groups had different rewards" in said
    assert "algorithm.filter_groups.max_num_gen_batches" in said
