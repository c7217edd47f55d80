"""A few tokens of high covariance get no gradient, so that the entropy lasts."""

from __future__ import annotations

from typing import Protocol

import torch

from ctrl_megatron.algorithms.masked import masked
from ctrl_megatron.algorithms.policy_losses.covariance import (
    over_tokens,
    select_clip_cov,
    token_covariances,
)
from ctrl_megatron.algorithms.policy_losses.ratios import (
    RANGE_OPTIONS,
    RangeConfig,
    bounded_exp,
    clip_sides,
    terms_of,
    weighted,
    whole_batch_loss,
)
from ctrl_megatron.algorithms.policy_losses.registry import (
    PolicyLossTerms,
    TokenSelection,
    register_policy_loss_terms,
)

_OPTIONS = (*RANGE_OPTIONS, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")


class ClipCovConfig(RangeConfig, Protocol):
    """What the loss reads of a configuration."""

    @property
    def clip_cov_ratio(self) -> float: ...
    @property
    def clip_cov_lb(self) -> float: ...
    @property
    def clip_cov_ub(self) -> float: ...


@torch.no_grad()
def clip_cov_covariances(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: ClipCovConfig,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """``token_covariances``, but -inf where PPO's clip has taken the gradient already."""
    low, high = clip_sides(config)
    ratio = bounded_exp(masked(log_prob - old_log_prob, response_mask))
    gains = masked(advantages, response_mask)
    outside = ((gains > 0) & (ratio > 1 + high)) | ((gains < 0) & (ratio < 1 - low))
    covariances = token_covariances(log_prob, advantages, response_mask, sums)
    return covariances.masked_fill(outside, -torch.inf)


def _choose(
    covariances: torch.Tensor, config: ClipCovConfig, generator: torch.Generator | None
) -> torch.Tensor:
    return select_clip_cov(
        covariances, config.clip_cov_ratio, config.clip_cov_lb, config.clip_cov_ub, generator
    )


@register_policy_loss_terms(
    "clip_cov",
    options=_OPTIONS,
    selection=TokenSelection(covariances=clip_cov_covariances, choose=_choose),
)
def clip_cov_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: ClipCovConfig,
    rollout_is_weights: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> PolicyLossTerms:
    """PPO's clipped loss per token, 0 without gradient where ``selected`` (B, R) bool is on.

    With r = exp(log_prob - old_log_prob): max(-A r, -A clip(r, 1 - low, 1 + high)), no dual clip.
    ``selected`` None draws from these rows by ``select_clip_cov``, with ``generator``; pieces of a
    mini-batch need the choice of the whole. All tensors (B, R); nothing off the mask reaches a
    value or a gradient. ``clipped`` marks the selected tokens and those that PPO's clip won.
    Source: Clip-Cov, arXiv 2505.22617, section 4.2. Raises ValueError as ``select_clip_cov`` and
    for a negative clip ratio.
    """
    low, high = clip_sides(config)
    if selected is None:
        covariances = clip_cov_covariances(
            old_log_prob, log_prob, advantages, response_mask, config
        )
        selected = over_tokens(
            _choose(covariances[response_mask.bool()], config, generator), response_mask
        )
    selected = selected.bool() & response_mask.bool()
    log_ratio = masked(log_prob - old_log_prob, response_mask)
    gains = masked(advantages, response_mask)
    ratio = bounded_exp(log_ratio)
    plain, clipped = -gains * ratio, -gains * ratio.clamp(1 - low, 1 + high)
    loss = masked(torch.maximum(plain, clipped), ~selected)
    return terms_of(
        weighted(loss, rollout_is_weights, response_mask), log_ratio, (clipped > plain) | selected
    )


compute_policy_loss_clip_cov = whole_batch_loss("clip_cov", clip_cov_terms, options=_OPTIONS)
"""``clip_cov_terms`` of a whole batch; see ``whole_batch_loss``."""
