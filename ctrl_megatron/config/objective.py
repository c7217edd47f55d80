"""Checks between the keys of what is optimised: estimator, loss, KL, sampling, correction."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from ctrl_megatron.config.schema import Config

_A, _R, _I = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "algorithm.rollout_correction.",
)
_GROUP_STD = ("algorithm.norm_adv_by_std_in_grpo",)
ADV_ESTIMATORS: Mapping[str, tuple[str, ...]] = {
    "grpo": _GROUP_STD,
    "gae": ("algorithm.gamma", "algorithm.lam"),
    "rloo": (),
    "reinforce_plus_plus": ("algorithm.gamma",),
    "reinforce_plus_plus_baseline": (),
    "remax": (),
    "opo": (),
    "gpg": ("algorithm.f_norm",),
    "cpgd": ("algorithm.weight_factor_in_cpgd",),
    "grpo_passk": _GROUP_STD,
}
"""Estimators of the built-in pipelines, and the keys that each of them reads."""
GROUPED = frozenset(ADV_ESTIMATORS) - {"gae", "reinforce_plus_plus", "remax"}
"""Estimators whose baseline is the group."""
_CLIP = tuple(_A + key for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"))
POLICY_LOSSES: Mapping[str, tuple[str, ...]] = {
    "vanilla": (*_CLIP, _A + "clip_ratio_c"),
    "gspo": _CLIP,
    "cpgd": _CLIP,
    "gpg": (),
    "cispo": _CLIP,
    "clip_cov": (*_CLIP, *(_A + k for k in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"))),
    "kl_cov": (_A + "kl_cov_ratio", _A + "ppo_kl_coef"),
    "geo_mean": _CLIP,
}
"""Policy losses and the keys that each of them reads."""


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
    if config.dag.custom_pipeline_fn is None:
        # A pipeline of one's own may register estimators and losses; the registry judges them.
        yield from _names(config)
    yield from _values(config)
    yield from _reward_functions(config)


def _get(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


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
    lower = keys.rollout_rs_threshold_lower
    if lower is not None and lower > keys.rollout_rs_threshold:
        yield (
            f"{_I}rollout_rs_threshold_lower={lower} is above {_I}rollout_rs_threshold="
            f"{keys.rollout_rs_threshold}; nothing would stay"
        )
    yield from _unread(
        config,
        read=(_I + "rollout_is_threshold",) if keys.rollout_is != "none" else (),
        others=(_I + "rollout_is_threshold",),
        why=f"with {_I}rollout_is=none",
    )
    rejection = (_I + "rollout_rs_threshold", _I + "rollout_rs_threshold_lower")
    yield from _unread(
        config,
        read=rejection if keys.rollout_rs != "none" else (),
        others=rejection,
        why=f"with {_I}rollout_rs=none",
    )


def _names(config: Config) -> Iterator[str]:
    tables = (
        ("algorithm.adv_estimator", ADV_ESTIMATORS),
        (_A + "policy_loss", POLICY_LOSSES),
    )
    more = "; names of your own need the module that registers them in dag.custom_pipeline_fn"
    for key, table in tables:
        name = _get(config, key)
        if name not in table:
            yield from unknown_name(key, name, tuple(table), more)
            continue
        others = {option for options in table.values() for option in options}
        yield from _unread(config, read=table[name], others=sorted(others), why=f"by {key}={name}")


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


def _unread(
    config: Config, *, read: Sequence[str], others: Sequence[str], why: str
) -> Iterator[str]:
    plain = Config()
    for key in others:
        value, default = _get(config, key), _get(plain, key)
        if key not in read and value != default:
            yield (
                f"{key}={json.dumps(value)} is not read {why}; leave it at {json.dumps(default)}"
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
