"""Advantage estimators (``algorithm.adv_estimator``) and policy losses (``actor.policy_loss``) by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import torch

from ctrl_megatron.algorithms.masked import Reduce, identity_reduce
from ctrl_megatron.config.options import accepted_options, explicit_parameters
from ctrl_megatron.errors import (
    UserError,
    convert_user_code_errors,
    describe_location,
    did_you_mean,
    is_user_defined,
)

E = TypeVar("E")
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[E]):
    """Entries of one kind by the names that a configuration uses. An Enum counts as its value."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, E] = {}

    def register(self, name: str | Enum) -> Callable[[E], E]:
        """Decorator that registers an entry as ``name``; ValueError if another entry has it."""

        def keep(entry: E) -> E:
            key = registry_name(name)
            if self._entries.get(key, entry) != entry:
                raise ValueError(f"the {self._kind} {key!r} is registered already")
            self._entries[key] = entry
            return entry

        return keep

    def get(self, name: str | Enum) -> E:
        """The entry called ``name``; ValueError listing the known names if there is none."""
        key = registry_name(name)
        if key not in self._entries:
            hint = did_you_mean(key, self) or ";"
            raise ValueError(f"unknown {self._kind} {key!r}{hint} known: {', '.join(self)}")
        return self._entries[key]

    def __getitem__(self, name: str | Enum) -> E:
        """``get`` as a mapping has it: KeyError for an unknown name."""
        try:
            return self.get(name)
        except ValueError as error:
            raise KeyError(str(error)) from None

    def __contains__(self, name: str | Enum) -> bool:
        return registry_name(name) in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))


def registry_name(name: str | Enum) -> str:
    """The name as a configuration writes it."""
    return str(name.value) if isinstance(name, Enum) else name


# Advantage estimators

AdvEstimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Some of ``ESTIMATOR_INPUTS`` as named arguments -> (advantages, returns), both (B, R)."""
ESTIMATOR_INPUTS = (
    *("token_level_rewards", "response_mask", "index", "values", "reward_baselines", "reduce"),
    *("reward_parts", "reward_weights"),
    *("gamma", "lam", "norm_adv_by_std_in_grpo", "weight_factor_in_cpgd"),
)
"""Arguments that an estimator may name: tensors of the batch (``index``: group ids;
``reward_parts`` (B, K): the rewards of single functions, NaN where unknown, with their
``reward_weights`` (K,)), the function ``reduce``, which adds a (K,) float64 tensor of the rows'
sums over the whole batch, and keys of ``algorithm``. Every other argument is an option:
``algorithm.adv_estimator_options``."""

ADV_ESTIMATOR_REGISTRY: Registry[AdvEstimator] = Registry("advantage estimator")
"""The advantage estimators by the name that `algorithm.adv_estimator` takes."""
register_adv_est = ADV_ESTIMATOR_REGISTRY.register
get_adv_estimator = ADV_ESTIMATOR_REGISTRY.get


def estimate_advantages(
    name: str | Enum, offered: Mapping[str, Any], reduce: Reduce = identity_reduce
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) of a piece of a batch, equal to those of the whole batch.

    ``offered`` contains ``response_mask`` and may contain more than the estimator has parameters
    for; the rest is left out, unless it has a ``**`` parameter. Groups must be whole. ``reduce``
    adds sums over the pieces; the caller of every piece must call it equally often. Raises
    ValueError naming a missing input, and for an estimator that returns another shape than that of
    ``response_mask``.
    """
    estimator = get_adv_estimator(name)
    if missing := required_estimator_inputs(name) - offered.keys():
        raise ValueError(
            f"advantage estimator {registry_name(name)!r} needs {', '.join(sorted(missing))}, "
            "which this pipeline does not provide"
        )
    given = accepted_options(estimator, offered)
    if "reduce" in explicit_parameters(estimator):
        given["reduce"] = reduce
    if not is_user_defined(estimator):
        found = estimator(**given)
    else:
        with convert_user_code_errors(f"advantage estimator {registry_name(name)!r} failed"):
            found = estimator(**given)
    return _checked(registry_name(name), estimator, found, offered["response_mask"])


def required_estimator_inputs(name: str | Enum) -> set[str]:
    """The arguments of the estimator without a default; ValueError for an unknown name."""
    named = explicit_parameters(get_adv_estimator(name))
    return {key for key, p in named.items() if p.default is p.empty} - {"reduce"}


def reads_reward_parts(name: str | Enum) -> bool:
    """Whether the estimator combines the rewards of single functions itself, as ``gdpo`` does.
    ValueError for an unknown name."""
    return "reward_parts" in explicit_parameters(get_adv_estimator(name))


def _checked(
    name: str, estimator: AdvEstimator, found: Any, response_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    who, place = f"advantage estimator {name!r}", describe_location(estimator)
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        kind = type(found).__name__
        raise UserError(f"{who} returns {kind}, not (advantages, returns): {place}")
    for what, tensor in zip(("advantages", "returns"), found, strict=True):
        shape, expected = getattr(tensor, "shape", None), response_mask.shape
        if shape != expected:
            raise UserError(
                f"{who} returns {what} of shape {None if shape is None else tuple(shape)}; "
                f"expected {tuple(expected)}, the shape of response_mask: {place}"
            )
        if is_user_defined(estimator) and not tensor[response_mask.bool()].isfinite().all():
            raise UserError(f"{who} returns {what} that are not finite: {place}")
    return found[0], found[1]


# Policy losses


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossTerms:
    """A policy loss per token: (B, R) values, 0 off the mask."""

    loss: torch.Tensor
    """The loss of each token; the only tensor with a gradient."""
    clipped: torch.Tensor
    """1 where a bound of the loss limits the token."""
    approx_kl: torch.Tensor
    """old - new log-prob: the k1 estimate of KL(old || new)."""
    clipped_lower: torch.Tensor
    """1 where the dual clip bounds the loss of a negative advantage."""


LossScalars = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower): means over all tokens, or the rows, of a
batch."""
PolicyLossFn = Callable[..., Any]
"""Some of ``LOSS_INPUTS`` as named arguments -> ``PolicyLossTerms`` or ``LossScalars``."""
LOSS_INPUTS = (
    *("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config"),
    *("rollout_is_weights", "selected"),
)
"""Arguments that a policy loss may name. Tensors are (B, R); ``config`` has the keys of
``actor_rollout_ref.actor``; only a loss with a ``TokenSelection`` gets ``selected``. Every other
argument is an option: ``actor_rollout_ref.actor.policy_loss_options``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSelection:
    """How a loss selects tokens of the whole mini-batch, for callers that have a piece of it."""

    covariances: Callable[..., torch.Tensor]
    """(old_log_prob, log_prob, advantages, response_mask, config, sums) -> (B, R) float64;
    ``sums`` are the ``log_prob_and_advantage_sums`` of the whole mini-batch."""
    choose: Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]
    """(covariances of all tokens of the mini-batch, (N,); config; random numbers of the same, (N,))
    -> (N,) bool.
    """


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A registered policy loss."""

    function: PolicyLossFn
    loss_agg_mode: str
    """The aggregation for which the loss was published: the default of its whole-batch form."""
    selection: TokenSelection | None
    """None for a loss that does not select tokens."""


POLICY_LOSS_REGISTRY: Registry[PolicyLoss] = Registry("policy loss")
"""The policy losses by the name that `actor_rollout_ref.actor.policy_loss` takes."""


def register_policy_loss(
    name: str | Enum,
    *,
    loss_agg_mode: str = "token-mean",
    selection: TokenSelection | None = None,
) -> Callable[[F], F]:
    """Decorator that registers a ``PolicyLossFn`` as ``name``; ValueError if another one has it.

    Return ``PolicyLossTerms`` where possible: the trainer computes micro-batches and adds them up,
    and only values per token can be divided by the counts of the whole mini-batch exactly. Four
    scalars are weighted by a micro-batch's share of the tokens (``token-mean``) or rows.
    """

    def keep(function: F) -> F:
        POLICY_LOSS_REGISTRY.register(name)(PolicyLoss(function, loss_agg_mode, selection))
        return function

    return keep
