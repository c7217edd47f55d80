"""Policy losses per token, and their common parts: clip range, bounded ratios, means of rows.

All tensors are (B, R), float32 or float64; nothing off the mask reaches a value or a gradient.
``config`` has the keys of ``actor_rollout_ref.actor`` as attributes; ``rollout_is_weights``
multiply the loss. r is exp(l), l = log_prob - old_log_prob bounded to +-20, A the advantage. A loss
with a clip range [1 - low, 1 + high] raises ValueError for a negative clip ratio.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ctrl_megatron.algorithms.masked import clamp_log_ratio, zero_outside_mask
from ctrl_megatron.algorithms.registry import PolicyLossTerms, register_policy_loss

_LARGEST_GSPO_EXPONENT = 10.0


def clip_range(config: Any) -> tuple[float, float]:
    """(low, high): a side that is None is ``clip_ratio``; 0.0 is a range.

    Raises ValueError for a negative side.
    """
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    if not (low >= 0 and high >= 0):
        raise ValueError(f"clip ratios must be at least 0, got low={low} and high={high}")
    return low, high


def clamped_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of ``log_ratio`` after ``clamp_log_ratio``, of the same shape and dtype."""
    return clamp_log_ratio(log_ratio).exp()


def row_means(values: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(B, 1) mean of each row of (B, R) values that are 0 off the mask; 0 for a row without
    tokens."""
    tokens = response_mask.bool().sum(dim=-1, keepdim=True).clamp(min=1)
    return values.sum(dim=-1, keepdim=True) / tokens


def apply_is_weights(
    loss: torch.Tensor, rollout_is_weights: torch.Tensor | None, response_mask: torch.Tensor
) -> torch.Tensor:
    """``loss`` (B, R) times the weights ``rollout_is_weights`` (B, R) under the mask; ``loss``
    itself where these are None."""
    if rollout_is_weights is None:
        return loss
    return loss * zero_outside_mask(rollout_is_weights, response_mask)


def policy_loss_terms(
    loss: torch.Tensor,
    log_ratio: torch.Tensor,
    clipped: torch.Tensor | None = None,
    clipped_lower: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """The terms of (B, R) parts that are 0 off the mask; a missing share is 0."""
    log_ratio = log_ratio.detach()
    none = torch.zeros_like(log_ratio)
    return PolicyLossTerms(
        loss=loss,
        clipped=none if clipped is None else clipped.to(log_ratio.dtype),
        approx_kl=-log_ratio,
        clipped_lower=none if clipped_lower is None else clipped_lower.to(log_ratio.dtype),
    )


@register_policy_loss("vanilla")
def vanilla_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """PPO's clipped surrogate max(-A r, -A clip(r, 1 - low, 1 + high)), for A < 0 at most -A c.

    Sources: PPO arXiv 1707.06347 equation 7; the dual clip by c = ``clip_ratio_c`` arXiv 1912.09729
    equation 5, which None leaves out; asymmetric range DAPO arXiv 2503.14476 section 3.1. Raises
    ValueError for a c of at most 1.
    """
    (low, high), c = clip_range(config), config.clip_ratio_c
    c = math.inf if c is None else c
    if not c > 1:
        raise ValueError(f"clip_ratio_c must be greater than 1, got {c}")
    log_ratio = zero_outside_mask(log_prob - old_log_prob, response_mask)
    gains = zero_outside_mask(advantages, response_mask)
    ratio = clamped_ratio(log_ratio)
    plain, clipped = -gains * ratio, -gains * ratio.clamp(1 - low, 1 + high)
    surrogate = torch.maximum(plain, clipped)
    bound = torch.where(gains < 0, -gains * c, math.inf)
    return policy_loss_terms(
        apply_is_weights(torch.minimum(surrogate, bound), rollout_is_weights, response_mask),
        log_ratio,
        clipped > plain,
        surrogate > bound,
    )


@register_policy_loss("gspo", loss_agg_mode="seq-mean-token-mean")
def gspo_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """The ratio of whole sequences: max(-A s, -A clip(s, 1 - low, 1 + high)).

    s_t = exp(log_prob_t - sg(log_prob_t) + sg(mean over the row of log_prob - old_log_prob)): its
    value is the row's geometric mean ratio, its gradient the token's own. The exponent is capped at
    10; rows must be whole. With ``seq-mean-token-mean`` and one advantage per row this is the
    gradient of the sequence form, and ``clipped`` is alike on all tokens of the row; there is no
    dual clip. Source: GSPO, arXiv 2507.18071, equations 5, 7 and 14.
    """
    low, high = clip_range(config)
    log_ratio = zero_outside_mask(log_prob - old_log_prob, response_mask)
    gains = zero_outside_mask(advantages, response_mask)
    own = zero_outside_mask(log_prob, response_mask)
    exponent = own - own.detach() + row_means(log_ratio.detach(), response_mask)
    ratio = exponent.clamp(max=_LARGEST_GSPO_EXPONENT).exp()
    plain, clipped = -gains * ratio, -gains * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, clipped)
    return policy_loss_terms(
        apply_is_weights(loss, rollout_is_weights, response_mask), log_ratio, clipped > plain
    )


@register_policy_loss("cispo")
def cispo_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """REINFORCE weighted by the clipped ratio: -sg(clip(r, 1 - low, 1 + high)) A log_prob.

    The ratio only weighs; every token keeps a gradient. ``clipped`` marks ratios outside the range.
    Source: MiniMax-M1, arXiv 2506.13585, equations 4 and 5. A ``low`` of at least 1 leaves the
    lower side open, as in the paper.
    """
    low, high = clip_range(config)
    log_ratio = zero_outside_mask(log_prob - old_log_prob, response_mask)
    gains, own = (
        zero_outside_mask(advantages, response_mask),
        zero_outside_mask(log_prob, response_mask),
    )
    ratio = clamped_ratio(log_ratio).detach()
    held = ratio.clamp(1 - low, 1 + high)
    loss = apply_is_weights(-held * gains * own, rollout_is_weights, response_mask)
    return policy_loss_terms(loss, log_ratio, held != ratio)


@register_policy_loss("cpgd")
def cpgd_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """The unbounded l itself is clipped, so that no ratio weighs a token: -A min(l, log(1 + high))
    where A > 0, else -A max(l, log(1 - low)).

    A token beyond the bound of its side has no gradient, the others that of plain REINFORCE. A
    ``low`` of at least 1 leaves the lower side open. The drift penalty of the paper is the KL term
    of the trainer's loss. Source: CPGD, arXiv 2505.12504.
    """
    low, high = clip_range(config)
    floor = math.log(1 - low) if low < 1 else -math.inf
    log_ratio = zero_outside_mask(log_prob - old_log_prob, response_mask)
    gains = zero_outside_mask(advantages, response_mask)
    bounded = torch.where(
        gains > 0, log_ratio.clamp(max=math.log(1 + high)), log_ratio.clamp(min=floor)
    )
    clipped = (bounded != log_ratio) & (gains != 0)
    loss = apply_is_weights(-gains * bounded, rollout_is_weights, response_mask)
    return policy_loss_terms(loss, log_ratio, clipped)


@register_policy_loss("geo_mean", loss_agg_mode="seq-mean-token-mean")
def geo_mean_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """On every token of row i: -A_i exp(mean over the row of l'), A_i the row's mean advantage.

    l' is l bounded from above by ``high`` where A > 0 and from below by -``low`` where A < 0: the
    range is one of log-ratios. ``rollout_is_weights`` count by the row's geometric mean, as the
    ratios that they correct do. Rows must be whole. ``seq-mean-token-mean`` gives the paper's mean
    over sequences. ``clipped`` marks tokens at their bound. Source: GMPO, arXiv 2507.20673, whose
    range is 0.4 on both sides.
    """
    low, high = clip_range(config)
    log_ratio = zero_outside_mask(log_prob - old_log_prob, response_mask)
    gains = zero_outside_mask(advantages, response_mask)
    held = torch.where(
        gains > 0,
        log_ratio.clamp(max=high),
        torch.where(gains < 0, log_ratio.clamp(min=-low), log_ratio),
    )
    # One token that the other side leaves open must not overflow the mean of its row.
    exponent = row_means(clamp_log_ratio(held), response_mask)
    rows = -row_means(gains, response_mask) * exponent.exp()
    if rollout_is_weights is not None:
        log_weights = zero_outside_mask(rollout_is_weights.log(), response_mask)
        rows = rows * row_means(log_weights, response_mask).exp()
    return policy_loss_terms(zero_outside_mask(rows, response_mask), log_ratio, held != log_ratio)


@register_policy_loss("sapo", loss_agg_mode="seq-mean-token-mean")
def sapo_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    rollout_is_weights: torch.Tensor | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> PolicyLossTerms:
    """A soft gate in place of the clip: -A sigmoid(tau (r - 1)) 4 / tau.

    tau is ``tau_pos`` where A > 0 and else ``tau_neg``; a larger one lets off-policy tokens fade
    sooner. The gate's slope is 1 at r = 1, so that the first step on a batch is REINFORCE's.
    ``clipped`` is 0. Raises ValueError for a tau of 0 or less. Source: SAPO, arXiv 2511.20347.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"tau_pos and tau_neg must be above 0, got {tau_pos} and {tau_neg}")
    log_ratio = zero_outside_mask(log_prob - old_log_prob, response_mask)
    gains = zero_outside_mask(advantages, response_mask)
    # Of two numbers torch would choose in float32.
    tau = torch.where(gains > 0, gains.new_tensor(tau_pos), gains.new_tensor(tau_neg))
    gate = torch.sigmoid(tau * (clamped_ratio(log_ratio) - 1)) * (4 / tau)
    return policy_loss_terms(
        apply_is_weights(-gains * gate, rollout_is_weights, response_mask), log_ratio
    )


@register_policy_loss("gpg")
def gpg_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    rollout_is_weights: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """REINFORCE: -A log_prob, whose value says nothing about progress.

    ``old_log_prob`` is read for ``approx_kl`` only. Source: GPG, arXiv 2504.02546.
    """
    log_ratio = zero_outside_mask(log_prob - old_log_prob, response_mask).detach()
    gains, own = (
        zero_outside_mask(advantages, response_mask),
        zero_outside_mask(log_prob, response_mask),
    )
    return policy_loss_terms(
        apply_is_weights(-gains * own, rollout_is_weights, response_mask), log_ratio
    )
