"""The log-ratio itself is clipped, so that no ratio weighs a token."""

from __future__ import annotations

import math

import torch

from ctrl_megatron.algorithms.masked import masked
from ctrl_megatron.algorithms.policy_losses.ratios import (
    RANGE_OPTIONS,
    RangeConfig,
    clip_range,
    terms_of,
    weighted,
)
from ctrl_megatron.algorithms.policy_losses.registry import (
    PolicyLossTerms,
    register_policy_loss_terms,
)


@register_policy_loss_terms("cpgd", options=RANGE_OPTIONS)
def cpgd_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: RangeConfig,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """Per token, with l = log_prob - old_log_prob: -A min(l, log(1 + high)) where A > 0, else
    -A max(l, log(1 - low)).

    A token beyond the bound of its side has no gradient, the others that of plain REINFORCE. All
    tensors (B, R); nothing off the mask reaches a value or a gradient. A ``low`` of at least 1
    leaves the lower side open. The drift penalty of the paper is the KL term of the trainer's loss.
    Source: CPGD, arXiv 2505.12504. Raises ValueError for a negative clip ratio.
    """
    low, high = clip_range(config)
    floor = math.log(1 - low) if low < 1 else -math.inf
    log_ratio = masked(log_prob - old_log_prob, response_mask)
    gains = masked(advantages, response_mask)
    bounded = torch.where(
        gains > 0, log_ratio.clamp(max=math.log(1 + high)), log_ratio.clamp(min=floor)
    )
    clipped = (bounded != log_ratio) & (gains != 0)
    loss = weighted(-gains * bounded, rollout_is_weights, response_mask)
    return terms_of(loss, log_ratio, clipped)
