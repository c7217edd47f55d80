"""Policy losses by configuration name (``actor.policy_loss``): per-token terms, whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ctrl_megatron.algorithms.registry import Registry, key_of


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
    choose: Callable[[torch.Tensor, Any, torch.Generator | None], torch.Tensor]
    """(covariances of all tokens of the mini-batch, (N,); config; generator) -> (N,) bool."""


@dataclass(frozen=True, slots=True)
class _TermsEntry:
    function: PolicyLossTermsFn
    options: frozenset[str]
    selection: TokenSelection | None


POLICY_LOSS_REGISTRY: Registry[PolicyLossFn] = Registry("policy loss")
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
        _TERMS.add(name, _TermsEntry(function, frozenset(options), selection))
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


def policy_loss_names() -> tuple[str, ...]:
    """The names of the losses with per-token terms, sorted."""
    return tuple(_TERMS)


def _terms(name: str | Enum) -> _TermsEntry:
    if name not in _TERMS and name in POLICY_LOSS_REGISTRY:
        raise ValueError(
            f"the policy loss {key_of(name)!r} is registered by register_policy_loss: it gives "
            "scalars of a whole batch, but the trainer cuts batches into pieces and adds their "
            "losses up; register a function that returns PolicyLossTerms, (B, R) values per token, "
            "with register_policy_loss_terms"
        )
    return _TERMS.get(name)
