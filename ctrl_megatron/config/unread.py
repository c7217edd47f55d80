"""Options that nothing reads, refused so that nobody waits for their effect.

Only a value that differs from the default is one that somebody has set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from typing import Any, NamedTuple

from ctrl_megatron.config.algorithm import Critic
from ctrl_megatron.config.coerce import leaf_keys
from ctrl_megatron.config.schema import Config

_A, _I = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
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
_VALUE_MODEL = tuple(key for key in leaf_keys(Critic, "critic.") if key != "critic.enable")
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
NAMED = (("algorithm.adv_estimator", ADV_ESTIMATORS), (_A + "policy_loss", POLICY_LOSSES))
"""Keys whose value is a name, and the names with what each of them reads."""


class _Switch(NamedTuple):
    """Options that are read only where another key says so."""

    options: tuple[str, ...]
    are_read: Callable[[Config], bool]
    off: str
    """The setting with which they are not."""
    remedy: str


def _switch(group: str, options: str, key: str, off: str | bool, remedy: str) -> _Switch:
    """``options`` below ``group``, unread while the ``key`` below it has the value ``off``."""
    return _Switch(
        options=tuple(group + option for option in options.split()),
        are_read=lambda config: value_of(config, group + key) != off,
        off=f"with {group}{key}={str(off).lower()}",
        remedy=remedy,
    )


_ON = "turn that on"
_SWITCHES = (
    _switch("algorithm.", "kl_ctrl.kl_coef kl_penalty", "use_kl_in_reward", False, _ON),
    _switch("algorithm.kl_ctrl.", "target_kl horizon", "type", "fixed", "use type=adaptive"),
    _switch(_A, "kl_loss_coef kl_loss_type", "use_kl_loss", False, _ON),
    _Switch(
        options=("actor_rollout_ref.ref.model.path",),
        are_read=lambda config: config.needs_reference,
        off="without a KL to the reference",
        remedy=f"turn on {_A}use_kl_loss or algorithm.use_kl_in_reward,",
    ),
    _switch("algorithm.filter_groups.", "max_num_gen_batches", "enable", False, _ON),
    _switch("reward.overlong_buffer.", "len penalty_factor", "enable", False, _ON),
    _switch(_I, "rollout_is_threshold", "rollout_is", "none", "use token or sequence there"),
    _switch(
        _I,
        "rollout_rs_threshold rollout_rs_threshold_lower",
        "rollout_rs",
        "none",
        "use token, sequence or geometric there",
    ),
    _switch(_A + "optim.", "min_lr_ratio", "lr_scheduler_type", "constant", "use cosine there"),
    _switch("critic.optim.", "min_lr_ratio", "lr_scheduler_type", "constant", "use cosine there"),
)


def unread_problems(config: Config) -> Iterator[str]:
    """One line per option that is set and that nothing reads."""
    yield from _by_name(config)
    yield from _clip_ratio(config)
    for switch in _SWITCHES:
        if not switch.are_read(config):
            yield from _unread(config, switch.options, switch.off, switch.remedy)
    yield from _value_model(config)


def value_of(config: Config, key: str) -> Any:
    """What stands at a dotted key."""
    return reduce(getattr, key.split("."), config)


def _by_name(config: Config) -> Iterator[str]:
    for key, table in NAMED:
        name = value_of(config, key)
        if name in table:  # what a name of one's own reads is not known here
            others = {option for options in table.values() for option in options}
            yield from _unread(config, sorted(others - set(table[name])), f"by {key}={name}")


def _clip_ratio(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    both = actor.clip_ratio_low is not None and actor.clip_ratio_high is not None
    if both and _A + "clip_ratio" in POLICY_LOSSES.get(actor.policy_loss, ()):
        why = f"where {_A}clip_ratio_low and {_A}clip_ratio_high are both set"
        yield from _unread(config, (_A + "clip_ratio",), why, "unset one of them")


def _value_model(config: Config) -> Iterator[str]:
    if config.needs_values:
        return
    estimator = config.algorithm.adv_estimator
    if config.critic.enable is False:
        why, remedy = "with critic.enable=false", "leave that unset with adv_estimator=gae"
    else:
        why = f"without a value model, which algorithm.adv_estimator={estimator} does not train"
        remedy = "use adv_estimator=gae"
    if config.dag.custom_pipeline_fn is not None:
        remedy = "set critic.enable=true"
    yield from _unread(config, _VALUE_MODEL, why, remedy)


def _unread(config: Config, options: Iterable[str], why: str, remedy: str = "") -> Iterator[str]:
    plain = Config()
    for key in options:
        value, default = value_of(config, key), value_of(plain, key)
        if value != default:
            first = f"{remedy} or " if remedy else ""
            yield (
                f"{key}={json.dumps(value)} is not read {why}; "
                f"{first}leave it at {json.dumps(default)}"
            )
