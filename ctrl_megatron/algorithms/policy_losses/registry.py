"""Policy losses by configuration name (``actor.policy_loss``): per-token terms, whole batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ctrl_megatron.algorithms.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossTerms:
    """(B, R) values, 0 off the mask; every scalar of a policy loss aggregates one of them."""

    loss: torch.Tensor
    """What is minimised; the only one with a gradient."""
    clipped: torch.Tensor
    """1 where the clipped side of the surrogate won."""
    approx_kl: torch.Tensor
    """old - new log-prob: the k1 estimate of KL(old || new)."""
    clipped_lower: torch.Tensor
    """1 where the dual clip bounds the loss of a negative advantage."""


PolicyLossTermsFn = Callable[..., PolicyLossTerms]
"""(old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights=None) -> terms."""
PolicyLossFn = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
"""As above with loss_agg_mode -> (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower)."""

POLICY_LOSS_REGISTRY: Registry[PolicyLossFn] = Registry("policy loss")
POLICY_LOSS_TERMS_REGISTRY: Registry[PolicyLossTermsFn] = Registry(
    "policy loss with per-token terms"
)
register_policy_loss = POLICY_LOSS_REGISTRY.register
get_policy_loss = POLICY_LOSS_REGISTRY.get
register_policy_loss_terms = POLICY_LOSS_TERMS_REGISTRY.register
get_policy_loss_terms = POLICY_LOSS_TERMS_REGISTRY.get
