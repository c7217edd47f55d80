"""Estimators (``algorithm.adv_estimator``) and policy losses (``actor.policy_loss``) by name.

A policy loss stands here in two forms: per-token terms for the trainer, which cuts batches into
pieces, and scalars of whole batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import torch

from ctrl_megatron.algorithms.masked import Reduce, nothing_to_add
from ctrl_megatron.errors import UserError, is_users, place_of, users_code

E = TypeVar("E")


class Registry(Generic[E]):
    """Entries of one kind by the names that a configuration uses. Enums count as their values."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, E] = {}

    def register(self, name: str | Enum) -> Callable[[E], E]:
        """Decorator that files an entry under ``name``; ValueError if another one has it."""

        def keep(entry: E) -> E:
            key = key_of(name)
            if self._entries.get(key, entry) != entry:
                raise ValueError(f"the {self._kind} {key!r} is registered already")
            self._entries[key] = entry
            return entry

        return keep

    def get(self, name: str | Enum) -> E:
        """The entry called ``name``; ValueError listing the known names otherwise."""
        key = key_of(name)
        if key not in self._entries:
            raise ValueError(f"unknown {self._kind} {key!r}; known: {', '.join(self)}")
        return self._entries[key]

    def __contains__(self, name: str | Enum) -> bool:
        return key_of(name) in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))


def key_of(name: str | Enum) -> str:
    """The name that a configuration would give."""
    return str(name.value) if isinstance(name, Enum) else name


AdvEstimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Named (B, R) tensors and options -> (advantages, returns), both (B, R).

One that needs numbers of the whole batch names ``reduce`` as an argument, a ``Reduce`` that is
``nothing_to_add`` by default, and calls it on a (K,) float64 tensor of its own rows' sums.
"""

ADV_ESTIMATOR_REGISTRY: Registry[AdvEstimator] = Registry("advantage estimator")
"""The advantage estimators by the name that `algorithm.adv_estimator` takes."""
register_adv_est = ADV_ESTIMATOR_REGISTRY.register
get_adv_estimator = ADV_ESTIMATOR_REGISTRY.get


def estimate_advantages(
    name: str | Enum, offered: Mapping[str, Any], reduce: Reduce = nothing_to_add
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) of a piece of a batch, as the estimator gives them for the whole.

    ``offered``, ``response_mask`` among it, may hold more than the estimator reads; the rest is
    left out, unless it takes ``**options``. Groups must be whole. ``reduce`` adds sums over the
    holders of the pieces; every holder calls it equally often. Raises ValueError naming a missing
    input, and for an estimator that gives another shape than that of ``response_mask``.
    """
    estimator = get_adv_estimator(name)
    named = _named_arguments(estimator)
    kinds = {p.kind for p in inspect.signature(estimator).parameters.values()}
    takes_anything = inspect.Parameter.VAR_KEYWORD in kinds
    if missing := required_inputs(name) - offered.keys():
        raise ValueError(
            f"advantage estimator {key_of(name)!r} needs {', '.join(sorted(missing))}, which this "
            "pipeline does not provide"
        )
    given = {k: v for k, v in offered.items() if k in named or takes_anything}
    if "reduce" in named:
        given["reduce"] = reduce
    if not is_users(estimator):
        found = estimator(**given)
    else:
        with users_code(f"advantage estimator {key_of(name)!r} failed"):
            found = estimator(**given)
    return _checked(key_of(name), estimator, found, offered["response_mask"])


def required_inputs(name: str | Enum) -> set[str]:
    """What the estimator ``name`` cannot do without; ValueError for an unknown name."""
    named = _named_arguments(get_adv_estimator(name))
    return {key for key, p in named.items() if p.default is p.empty} - {"reduce"}


def _checked(
    name: str, estimator: AdvEstimator, found: Any, response_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    who, place = f"advantage estimator {name!r}", place_of(estimator)
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        kind = type(found).__name__
        raise UserError(f"{who} gives {kind}, not (advantages, returns): {place}")
    for what, tensor in zip(("advantages", "returns"), found, strict=True):
        shape, expected = getattr(tensor, "shape", None), response_mask.shape
        if shape != expected:
            raise UserError(
                f"{who} gives {what} of shape {None if shape is None else tuple(shape)}; expected "
                f"{tuple(expected)}, that of response_mask: {place}"
            )
        if is_users(estimator) and not tensor[response_mask.bool()].isfinite().all():
            raise UserError(f"{who} gives {what} that are not finite: {place}")
    return found[0], found[1]


def _named_arguments(function: AdvEstimator) -> dict[str, inspect.Parameter]:
    loose = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind not in loose}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossTerms:
    """(B, R) values, 0 off the mask; every scalar of a policy loss aggregates one of them."""

    loss: torch.Tensor
    """What is minimised; the only one with a gradient."""
    clipped: torch.Tensor
    """1 where a bound of the loss holds the token."""
    approx_kl: torch.Tensor
    """old - new log-prob: the k1 estimate of KL(old || new)."""
    clipped_lower: torch.Tensor
    """1 where the dual clip bounds the loss of a negative advantage."""


PolicyLossTermsFn = Callable[..., PolicyLossTerms]
"""(old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights=None) -> terms;
with a ``TokenSelection`` also selected=None. All tensors have the mask's shape (B, R), which the
caller checks (``check_shapes``)."""
PolicyLossFn = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
"""As above with loss_agg_mode -> (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSelection:
    """How a loss picks tokens of the whole mini-batch, for callers that hold a piece of it."""

    covariances: Callable[..., torch.Tensor]
    """(old_log_prob, log_prob, advantages, response_mask, config, sums) -> (B, R) float64;
    ``sums`` are the ``covariance_sums`` of the whole mini-batch."""
    choose: Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]
    """(covariances of all tokens of the mini-batch, (N,); config; lots of the same tokens, (N,)) ->
    (N,) bool."""


@dataclass(frozen=True, slots=True)
class _TermsEntry:
    function: PolicyLossTermsFn
    options: frozenset[str]
    selection: TokenSelection | None


POLICY_LOSS_REGISTRY: Registry[PolicyLossFn] = Registry("policy loss")
"""The policy losses by the name that `actor_rollout_ref.actor.policy_loss` takes."""
_TERMS: Registry[_TermsEntry] = Registry("policy loss with per-token terms")
register_policy_loss = POLICY_LOSS_REGISTRY.register
get_policy_loss = POLICY_LOSS_REGISTRY.get


def register_policy_loss_terms(
    name: str | Enum, *, options: Iterable[str] = (), selection: TokenSelection | None = None
) -> Callable[[PolicyLossTermsFn], PolicyLossTermsFn]:
    """Decorator that files a terms function under ``name``; ValueError if another one has it.

    ``options`` are the attributes that it reads of ``config``. A loss with a ``selection`` takes
    the argument ``selected``, (B, R) bool.
    """

    def keep(function: PolicyLossTermsFn) -> PolicyLossTermsFn:
        _TERMS.register(name)(_TermsEntry(function, frozenset(options), selection))
        return function

    return keep


def get_policy_loss_terms(name: str | Enum) -> PolicyLossTermsFn:
    """The terms function called ``name``; ValueError listing the known names otherwise."""
    return _terms(name).function


def policy_loss_options(name: str | Enum) -> frozenset[str]:
    """The configuration keys that the loss ``name`` reads; ValueError for an unknown name."""
    return _terms(name).options


def token_selection(name: str | Enum) -> TokenSelection | None:
    """How the loss ``name`` selects tokens, None if it does not; ValueError for an unknown name."""
    return _terms(name).selection


def _terms(name: str | Enum) -> _TermsEntry:
    if name not in _TERMS and name in POLICY_LOSS_REGISTRY:
        raise ValueError(
            f"the policy loss {key_of(name)!r} is registered by register_policy_loss: it gives "
            "scalars of a whole batch, but the trainer cuts batches into pieces and adds their "
            "losses up; register a function that returns PolicyLossTerms, (B, R) values per token, "
            "with register_policy_loss_terms"
        )
    return _TERMS.get(name)
