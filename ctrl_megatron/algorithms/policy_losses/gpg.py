"""REINFORCE: no ratio and no clip."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.masked import masked
from ctrl_megatron.algorithms.policy_losses.ratios import (
    terms_of,
    weighted,
)
from ctrl_megatron.algorithms.policy_losses.registry import (
    PolicyLossTerms,
    register_policy_loss_terms,
)


@register_policy_loss_terms("gpg")
def gpg_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: object | None,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """Per token: -A log_prob.

    All tensors (B, R); nothing off the mask reaches a value or a gradient. ``old_log_prob`` is read
    for ``approx_kl`` only, ``config`` not at all. The value of the loss says nothing about
    progress; its gradient is the policy gradient. Source: GPG, arXiv 2504.02546.
    """
    del config
    log_ratio = masked(log_prob - old_log_prob, response_mask).detach()
    gains, own = masked(advantages, response_mask), masked(log_prob, response_mask)
    return terms_of(weighted(-gains * own, rollout_is_weights, response_mask), log_ratio)
