"""What the losses share: the clip range, bounded ratios, means of rows, the terms they return."""

from __future__ import annotations

from typing import Protocol

import torch

from ctrl_megatron.algorithms.masked import masked
from ctrl_megatron.algorithms.policy_losses.registry import PolicyLossTerms

# Ratios beyond exp(20) say nothing more; without the bound one stale token could give inf * 0.
LOG_RATIO_BOUND = 20.0
RANGE_OPTIONS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")


class RangeConfig(Protocol):
    """What a loss with a clip range reads of a configuration."""

    @property
    def clip_ratio(self) -> float: ...
    @property
    def clip_ratio_low(self) -> float | None: ...
    @property
    def clip_ratio_high(self) -> float | None: ...


def clip_range(config: RangeConfig) -> tuple[float, float]:
    """(low, high): a side that is None takes ``clip_ratio``, 0.0 is kept.

    Raises ValueError for a negative side.
    """
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    if not (low >= 0 and high >= 0):
        raise ValueError(f"clip ratios must be at least 0, got low={low} and high={high}")
    return low, high


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of the log-ratio bounded to +-20."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def row_means(values: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(B, 1) mean of each row of (B, R) values that are 0 off the mask; 0 for a row without
    tokens."""
    tokens = response_mask.bool().sum(dim=-1, keepdim=True).clamp(min=1)
    return values.sum(dim=-1, keepdim=True) / tokens


def weighted(
    loss: torch.Tensor, rollout_is_weights: torch.Tensor | None, response_mask: torch.Tensor
) -> torch.Tensor:
    """``loss`` times the weights under the mask, or as it is without weights."""
    if rollout_is_weights is None:
        return loss
    return loss * masked(rollout_is_weights, response_mask)


def terms_of(
    loss: torch.Tensor,
    log_ratio: torch.Tensor,
    clipped: torch.Tensor | None = None,
    clipped_lower: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """Terms of (B, R) parts that are 0 off the mask; a share that a loss does not have is 0."""
    log_ratio = log_ratio.detach()
    none = torch.zeros_like(log_ratio)
    return PolicyLossTerms(
        loss=loss,
        clipped=none if clipped is None else clipped.to(log_ratio.dtype),
        approx_kl=-log_ratio,
        clipped_lower=none if clipped_lower is None else clipped_lower.to(log_ratio.dtype),
    )
