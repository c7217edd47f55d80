"""REINFORCE weighted by the clipped ratio: a clip that drops no token."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.masked import masked
from ctrl_megatron.algorithms.policy_losses.ratios import (
    RANGE_OPTIONS,
    RangeConfig,
    bounded_exp,
    clip_range,
    terms_of,
    weighted,
)
from ctrl_megatron.algorithms.policy_losses.registry import (
    PolicyLossTerms,
    register_policy_loss_terms,
)


@register_policy_loss_terms("cispo", options=RANGE_OPTIONS)
def cispo_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: RangeConfig,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """Per token, with r = exp(log_prob - old_log_prob): -sg(clip(r, 1 - low, 1 + high)) A log_prob.

    The ratio only weighs; every token keeps a gradient. All tensors (B, R); nothing off the mask
    reaches a value or a gradient. ``clipped`` marks ratios outside the range. The log-ratio is
    bounded to +-20. Source: MiniMax-M1, arXiv 2506.13585, equations 4 and 5. A ``low`` of at least
    1 leaves the lower side open, as in the paper. Raises ValueError for a negative clip ratio.
    """
    low, high = clip_range(config)
    log_ratio = masked(log_prob - old_log_prob, response_mask)
    gains, own = masked(advantages, response_mask), masked(log_prob, response_mask)
    ratio = bounded_exp(log_ratio).detach()
    held = ratio.clamp(1 - low, 1 + high)
    loss = weighted(-held * gains * own, rollout_is_weights, response_mask)
    return terms_of(loss, log_ratio, held != ratio)
