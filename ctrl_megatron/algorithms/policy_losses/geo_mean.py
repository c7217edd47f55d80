"""The geometric mean of a row's ratios, each clipped for itself."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.masked import masked
from ctrl_megatron.algorithms.policy_losses.ratios import (
    LOG_RATIO_BOUND,
    RANGE_OPTIONS,
    RangeConfig,
    clip_range,
    row_means,
    terms_of,
)
from ctrl_megatron.algorithms.policy_losses.registry import (
    PolicyLossTerms,
    register_policy_loss_terms,
)


@register_policy_loss_terms("geo_mean", options=RANGE_OPTIONS)
def geo_mean_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: RangeConfig,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """On every token of row i: -A_i exp(mean over the row of l'), A_i the row's mean advantage.

    l' is l = log_prob - old_log_prob bounded from above by ``high`` where A > 0 and from below by
    -``low`` where A < 0: the range is one of log-ratios. ``rollout_is_weights`` count by the row's
    geometric mean, as the ratios that they correct do. All tensors (B, R) with whole rows; nothing
    off the mask reaches a value or a gradient. ``seq-mean-token-mean`` gives the paper's mean over
    sequences. ``clipped`` marks tokens at their bound. Source: GMPO, arXiv 2507.20673, whose range
    is 0.4 on both sides. Raises ValueError for a negative clip ratio.
    """
    low, high = clip_range(config)
    log_ratio = masked(log_prob - old_log_prob, response_mask)
    gains = masked(advantages, response_mask)
    held = torch.where(
        gains > 0,
        log_ratio.clamp(max=high),
        torch.where(gains < 0, log_ratio.clamp(min=-low), log_ratio),
    )
    # One token that the other side leaves open must not overflow the mean of its row.
    exponent = row_means(held.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), response_mask)
    rows = -row_means(gains, response_mask) * exponent.exp()
    if rollout_is_weights is not None:
        log_weights = masked(rollout_is_weights.log(), response_mask)
        rows = rows * row_means(log_weights, response_mask).exp()
    return terms_of(masked(rows, response_mask), log_ratio, held != log_ratio)
