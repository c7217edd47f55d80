"""Checks between the keys of what is optimised: estimator, loss, KL, sampling, correction."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from ctrl_megatron.config.schema import Config
from ctrl_megatron.config.unread import ADV_ESTIMATORS, NAMED, unread_problems, value_of

_A, _R, _I = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "algorithm.rollout_correction.",
)
GROUPED = frozenset(ADV_ESTIMATORS) - {"gae", "reinforce_plus_plus", "remax"}
"""Estimators whose baseline is the group."""


def unknown_name(key: str, value: str, names: Sequence[str], more: str = "") -> Iterator[str]:
    """The sentence about a name that is not one of ``names``; nothing if it is."""
    if value in names:
        return
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    yield f"{key} must be one of {', '.join(names)}, not {value!r}{hint}{more}"


def objective_problems(config: Config) -> Iterator[str]:
    """One line per problem."""
    yield from _kl(config)
    yield from _sampling(config)
    yield from _correction(config)
    yield from _clip_cov(config)
    if config.dag.custom_pipeline_fn is None:
        # A pipeline of one's own may register estimators and losses; the registry judges them.
        yield from _names(config)
    yield from _values(config)
    yield from _reward_functions(config)
    yield from unread_problems(config)


def _kl(config: Config) -> Iterator[str]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            f"{_A}use_kl_loss and algorithm.use_kl_in_reward are both on; the KL belongs either "
            f"in the loss or in the reward, turn one of them off"
        )
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        yield (
            "algorithm.kl_ctrl.type=adaptive has no effect without "
            "algorithm.use_kl_in_reward=true; turn that on or use type=fixed"
        )
    prompts, each = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    horizon, sequences = algorithm.kl_ctrl.horizon, prompts * each
    adaptive = algorithm.kl_ctrl.type == "adaptive" and algorithm.use_kl_in_reward
    # An update changes the coefficient by up to a fifth of sequences / horizon of itself.
    if adaptive and 5 * horizon <= sequences:
        yield (
            f"algorithm.kl_ctrl.horizon={horizon} is too short for steps of data.train_batch_size="
            f"{prompts} x {_R}n={each} = {sequences} sequences, the coefficient would turn "
            f"negative; raise it to at least {sequences // 5 + 1}"
        )


def _sampling(config: Config) -> Iterator[str]:
    rollout, estimator = config.actor_rollout_ref.rollout, config.algorithm.adv_estimator
    if estimator in GROUPED and rollout.n == 1:
        yield (
            f"{_R}n=1 gives algorithm.adv_estimator={estimator} groups of one, without a baseline; "
            f"set {_R}n to 2 or more"
        )
    if config.algorithm.filter_groups.enable and rollout.n == 1:
        yield (
            f"{_R}n=1 gives algorithm.filter_groups groups of one, which never have different "
            f"rewards; set {_R}n to 2 or more"
        )
    if config.algorithm.filter_groups.enable and estimator == "remax":
        yield (
            "algorithm.filter_groups replaces prompts whose greedy critique "
            "algorithm.adv_estimator=remax would need; turn it off or choose another estimator"
        )
    if rollout.temperature == 0:
        yield (
            f"{_R}temperature=0 is greedy, which makes all critiques of a prompt equal; "
            f"give a temperature above 0 (validation is greedy by itself)"
        )
    buffer, longest = config.reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and buffer.len > longest:
        yield (
            f"reward.overlong_buffer.len={buffer.len} is longer than data.max_response_length="
            f"{longest}; lower it"
        )


def _correction(config: Config) -> Iterator[str]:
    keys = config.algorithm.rollout_correction
    upper, lower = keys.rollout_rs_threshold, keys.rollout_rs_threshold_lower
    if keys.rollout_rs == "none":
        return
    if lower is not None and lower > upper:
        yield (
            f"{_I}rollout_rs_threshold_lower={lower} is above {_I}rollout_rs_threshold={upper}; "
            f"nothing would stay, lower it"
        )
    if lower is None and 0 < upper < 1:
        yield (
            f"{_I}rollout_rs_threshold={upper} is below 1 / {upper}, which is the lower threshold "
            f"where {_I}rollout_rs_threshold_lower is unset; nothing would stay, raise it to 1 or "
            f"more or set the lower one"
        )


def _clip_cov(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    if actor.policy_loss == "clip_cov" and actor.clip_cov_lb > actor.clip_cov_ub:
        yield (
            f"{_A}clip_cov_lb={actor.clip_cov_lb} is above {_A}clip_cov_ub={actor.clip_cov_ub}; "
            f"no covariance lies between, lower it or raise the other"
        )


def _names(config: Config) -> Iterator[str]:
    more = "; names of your own need the module that registers them in dag.custom_pipeline_fn"
    for key, table in NAMED:
        yield from unknown_name(key, value_of(config, key), tuple(table), more)


def _values(config: Config) -> Iterator[str]:
    estimator, enable = config.algorithm.adv_estimator, config.critic.enable
    if estimator == "gae" and enable is False:
        yield (
            "algorithm.adv_estimator=gae reads the values of a value model, which "
            "critic.enable=false turns off; leave critic.enable unset or choose another estimator"
        )
    if estimator != "gae" and enable and config.dag.custom_pipeline_fn is None:
        yield (
            f"critic.enable=true trains a value model that algorithm.adv_estimator={estimator} "
            f"never reads; leave critic.enable unset or use adv_estimator=gae"
        )
    if config.trainer.critic_warmup and not config.needs_values:
        yield (
            f"trainer.critic_warmup={config.trainer.critic_warmup} has nobody to warm up: "
            f"algorithm.adv_estimator={estimator} has no value model; set it to 0"
        )


def _reward_functions(config: Config) -> Iterator[str]:
    names, weights = config.reward.reward_funcs, config.reward.reward_weights
    if not names or len(set(names)) < len(names):
        yield f"reward.reward_funcs={list(names)} must name at least one reward function, each once"
    elif weights and len(weights) != len(names):
        yield (
            f"reward.reward_weights has {len(weights)} entries for {len(names)} reward functions "
            f"({', '.join(names)}); give one each, or none for 1 each"
        )
    elif not any(config.reward.weights.values()):
        yield "reward.reward_weights are all 0; nothing would be rewarded"
    unread = set(config.reward.reward_options) - (set(names) - {"critic"})
    if unread:
        yield (
            f"reward.reward_options.{min(unread)} belongs to no function of reward.reward_funcs "
            "(critic takes its options from reward.*)"
        )
    if "critic" not in names and config.algorithm.filter_groups.enable:
        yield (
            "algorithm.filter_groups looks at the critic's reward, which reward.reward_funcs "
            "lacks; name it, or turn filter_groups off"
        )
