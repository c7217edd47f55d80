"""PPO's clipped surrogate with an asymmetric range and the dual clip."""

from __future__ import annotations

from typing import Protocol

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

_OPTIONS = (*RANGE_OPTIONS, "clip_ratio_c")


class ClipConfig(RangeConfig, Protocol):
    """What the loss reads of a configuration."""

    @property
    def clip_ratio_c(self) -> float: ...


@register_policy_loss_terms("vanilla", options=_OPTIONS)
def vanilla_terms(
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
    1912.09729 equation 5; asymmetric range DAPO arXiv 2503.14476 section 3.1. Raises ValueError for
    a negative clip ratio and for a ``clip_ratio_c`` of at most 1.
    """
    (low, high), c = clip_range(config), config.clip_ratio_c
    if not c > 1:
        raise ValueError(f"clip_ratio_c must be greater than 1, got {c}")
    log_ratio = masked(log_prob - old_log_prob, response_mask)
    gains = masked(advantages, response_mask)
    ratio = bounded_exp(log_ratio)
    plain, clipped = -gains * ratio, -gains * ratio.clamp(1 - low, 1 + high)
    surrogate = torch.maximum(plain, clipped)
    bound = -gains * c
    loss = torch.where(gains < 0, torch.minimum(surrogate, bound), surrogate)
    return terms_of(
        weighted(loss, rollout_is_weights, response_mask),
        log_ratio,
        clipped > plain,
        (surrogate > bound) & (gains < 0),
    )
