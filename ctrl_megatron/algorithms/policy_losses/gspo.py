"""The ratio of whole sequences instead of tokens."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.masked import masked
from ctrl_megatron.algorithms.policy_losses.ratios import (
    RANGE_OPTIONS,
    RangeConfig,
    clip_range,
    row_means,
    terms_of,
    weighted,
)
from ctrl_megatron.algorithms.policy_losses.registry import (
    PolicyLossTerms,
    register_policy_loss_terms,
)

_LARGEST_EXPONENT = 10.0


@register_policy_loss_terms("gspo", options=RANGE_OPTIONS)
def gspo_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: RangeConfig,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """Per token: max(-A s, -A clip(s, 1 - low, 1 + high)) with the sequence's ratio s.

    s_t = exp(log_prob_t - sg(log_prob_t) + sg(mean over the row of log_prob - old_log_prob)): its
    value is the row's geometric mean ratio, its gradient the token's own. The exponent is capped at
    10. All tensors (B, R) with whole rows; nothing off the mask reaches a value or a gradient. With
    ``seq-mean-token-mean`` and one advantage per row this is the gradient of the sequence form.
    ``clipped`` is alike on all tokens of a row with one advantage; there is no dual clip. Source:
    GSPO, arXiv 2507.18071, equations 5, 7 and 14. Raises ValueError for a negative clip ratio.
    """
    low, high = clip_range(config)
    log_ratio = masked(log_prob - old_log_prob, response_mask)
    gains = masked(advantages, response_mask)
    own = masked(log_prob, response_mask)
    exponent = own - own.detach() + row_means(log_ratio.detach(), response_mask)
    ratio = exponent.clamp(max=_LARGEST_EXPONENT).exp()
    plain, clipped = -gains * ratio, -gains * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, clipped)
    return terms_of(weighted(loss, rollout_is_weights, response_mask), log_ratio, clipped > plain)
