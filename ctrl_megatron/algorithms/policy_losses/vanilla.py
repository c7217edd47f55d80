"""PPO's clipped surrogate with an asymmetric range and the dual clip."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ctrl_megatron.algorithms.aggregation import agg_loss
from ctrl_megatron.algorithms.masked import masked
from ctrl_megatron.algorithms.policy_losses.registry import (
    PolicyLossTerms,
    register_policy_loss,
    register_policy_loss_terms,
)

# Ratios beyond exp(20) say nothing more; without the bound one stale token could give inf * 0.
_LOG_RATIO_BOUND = 20.0


class ClipConfig(Protocol):
    """What the clipped losses read of a configuration."""

    @property
    def clip_ratio(self) -> float: ...
    @property
    def clip_ratio_low(self) -> float | None: ...
    @property
    def clip_ratio_high(self) -> float | None: ...
    @property
    def clip_ratio_c(self) -> float: ...


class ClipRange(NamedTuple):
    """The ratio is held in [1 - low, 1 + high]; a negative advantage counts at most c times."""

    low: float
    high: float
    c: float


def clip_range(config: ClipConfig) -> ClipRange:
    """The range a configuration asks for: a side that is None takes ``clip_ratio``, 0.0 is kept.

    Raises ValueError for a negative side or ``clip_ratio_c`` of at most 1.
    """
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    if not (low >= 0 and high >= 0):
        raise ValueError(f"clip ratios must be at least 0, got low={low} and high={high}")
    if not config.clip_ratio_c > 1:
        raise ValueError(f"clip_ratio_c must be greater than 1, got {config.clip_ratio_c}")
    return ClipRange(low, high, config.clip_ratio_c)


@register_policy_loss_terms("vanilla")
def policy_loss_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: ClipConfig,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """Per token, with r = exp(log_prob - old_log_prob): max(-A r, -A clip(r, 1 - low, 1 + high)).

    For A < 0 the loss is at most -A c (dual clip). All tensors (B, R), float32 or float64;
    ``rollout_is_weights`` multiplies the loss. Nothing off the mask reaches a value or a gradient.
    The log-ratio is bounded to +-20. Sources: PPO arXiv 1707.06347 equation 7; dual clip arXiv
    1912.09729 equation 5; asymmetric range DAPO arXiv 2503.14476 section 3.1.
    """
    low, high, c = clip_range(config)
    log_ratio = masked(log_prob - old_log_prob, response_mask)
    gains = masked(advantages, response_mask)
    ratio = log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()
    plain, clipped = -gains * ratio, -gains * ratio.clamp(1 - low, 1 + high)
    surrogate = torch.maximum(plain, clipped)
    bound = -gains * c
    loss = torch.where(gains < 0, torch.minimum(surrogate, bound), surrogate)
    if rollout_is_weights is not None:
        loss = loss * masked(rollout_is_weights, response_mask)
    return PolicyLossTerms(
        loss=loss,
        clipped=(clipped > plain).to(loss.dtype),
        approx_kl=-log_ratio.detach(),
        clipped_lower=((surrogate > bound) & (gains < 0)).to(loss.dtype),
    )


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ClipConfig | None = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``policy_loss_terms`` of a whole batch: (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower).

    Four scalars; the loss by ``loss_agg_mode``, the others as means over tokens, without gradient.
    Pieces of a batch are for ``policy_loss_terms`` and ``agg_loss`` with global denominators.
    """
    if config is None:
        raise ValueError(
            "compute_policy_loss_vanilla needs config: an object with clip_ratio, clip_ratio_low, "
            "clip_ratio_high and clip_ratio_c"
        )
    terms = policy_loss_terms(
        old_log_prob, log_prob, advantages, response_mask, config, rollout_is_weights
    )
    return (
        agg_loss(terms.loss, response_mask, loss_agg_mode),
        agg_loss(terms.clipped, response_mask, "token-mean"),
        agg_loss(terms.approx_kl, response_mask, "token-mean"),
        agg_loss(terms.clipped_lower, response_mask, "token-mean"),
    )
