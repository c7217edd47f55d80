"""The geometric mean of a row's ratios, each clipped for itself."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.masked import masked
from ctrl_megatron.algorithms.policy_losses.ratios import (
    LOG_RATIO_BOUND,
    RANGE_OPTIONS,
    RangeConfig,
    clip_sides,
    given,
    row_means,
    terms_of,
    weighted,
    whole_batch,
)
from ctrl_megatron.algorithms.policy_losses.registry import (
    PolicyLossTerms,
    register_policy_loss,
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
    -``low`` where A < 0: the range is one of log-ratios. All tensors (B, R) with whole rows;
    nothing off the mask reaches a value or a gradient. ``seq-mean-token-mean`` gives the paper's
    mean over sequences. ``clipped`` marks tokens at their bound. Source: GMPO, arXiv 2507.20673,
    whose range is 0.4 on both sides. Raises ValueError for a negative clip ratio.
    """
    low, high = clip_sides(config)
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
    loss = weighted(masked(rows, response_mask), rollout_is_weights, response_mask)
    return terms_of(loss, log_ratio, held != log_ratio)


@register_policy_loss("geo_mean")
def compute_policy_loss_geo_mean(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: RangeConfig | None = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``geo_mean_terms`` of a whole batch: (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower)."""
    config = given(config, "compute_policy_loss_geo_mean", *RANGE_OPTIONS)
    terms = geo_mean_terms(
        old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights
    )
    return whole_batch(terms, response_mask, loss_agg_mode)
