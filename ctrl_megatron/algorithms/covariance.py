"""The losses clip_cov and kl_cov, which restrain the few tokens that make the entropy collapse.

The covariance of a token's log-prob and advantage says how much it changes the entropy. Both losses
select among all tokens of a mini-batch: a caller that has a piece of it adds
``log_prob_and_advantage_sums`` over the pieces, gathers the ``covariances`` of the loss's
``TokenSelection`` under the mask and the tokens' random numbers (``token_random_numbers``), calls
``choose`` on the gathered tensors, and passes each piece its part as ``selected``. Source of
everything here: arXiv 2505.22617, section 4.2.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from ctrl_megatron.algorithms.masked import masked_row_sums, require_equal_shapes, zero_outside_mask
from ctrl_megatron.algorithms.policy_losses import (
    apply_is_weights,
    clamped_ratio,
    clip_range,
    policy_loss_terms,
)
from ctrl_megatron.algorithms.registry import PolicyLossTerms, TokenSelection, register_policy_loss


def log_prob_and_advantage_sums(
    log_prob: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """(3,) float64 that add over pieces: tokens, sum of log-probs, sum of advantages.

    Inputs (B, R). Raises ValueError for shapes that differ.
    """
    require_equal_shapes(response_mask=response_mask, log_prob=log_prob, advantages=advantages)
    total = [masked_row_sums(values, response_mask).sum() for values in (log_prob, advantages)]
    return torch.stack([response_mask.bool().sum().double(), *total])


@torch.no_grad()
def token_covariances(
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    sums: torch.Tensor,
) -> torch.Tensor:
    """(log_prob - mean) (advantage - mean) of each token: (B, R) float64, 0 off the mask.

    The means are those of ``sums``, the ``log_prob_and_advantage_sums`` of the whole mini-batch.
    Raises ValueError for shapes that differ.
    """
    require_equal_shapes(response_mask=response_mask, log_prob=log_prob, advantages=advantages)
    mean_log_prob, mean_advantage = sums[1:] / sums[0].clamp(min=1)
    product = (log_prob.double() - mean_log_prob) * (advantages.double() - mean_advantage)
    return zero_outside_mask(product, response_mask)


def scatter_selection(selected: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(B, R) bool of the (N,) choice among the tokens under the mask, in row order."""
    spread = torch.zeros_like(response_mask, dtype=torch.bool)
    spread[response_mask.bool()] = selected
    return spread


def token_random_numbers(names: Sequence[str], response_mask: torch.Tensor) -> torch.Tensor:
    """(B, R) float64 in [0, 1): a random number per token that depends only on the row's name and
    the token's position, so that a draw does not depend on ranks or order. Names must differ.
    """
    width, generator = response_mask.shape[1], torch.Generator()
    rows = []
    for name in names:
        digest = hashlib.sha256(name.encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:7], "big"))
        rows.append(torch.rand(width, dtype=torch.float64, generator=generator))
    return torch.stack(rows) if rows else torch.zeros(response_mask.shape, dtype=torch.float64)


def _how_many(ratio: float, tokens: int, key: str) -> int:
    """floor(``ratio`` * ``tokens``), but at least one token unless the ratio or the batch is 0.

    Raises ValueError naming ``key`` for a ratio outside [0, 1].
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"{key} must lie in [0, 1], got {ratio}")
    return min(tokens, max(1, math.floor(ratio * tokens))) if ratio else 0


@torch.no_grad()
def _clip_cov_covariances(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    sums: torch.Tensor,
) -> torch.Tensor:
    """``token_covariances``, but -inf where PPO's clip has taken the gradient already."""
    low, high = clip_range(config)
    ratio = clamped_ratio(zero_outside_mask(log_prob - old_log_prob, response_mask))
    gains = zero_outside_mask(advantages, response_mask)
    outside = ((gains > 0) & (ratio > 1 + high)) | ((gains < 0) & (ratio < 1 - low))
    covariances = token_covariances(log_prob, advantages, response_mask, sums)
    return covariances.masked_fill(outside, -torch.inf)


def select_clip_cov_tokens(
    covariances: torch.Tensor, config: Any, random_numbers: torch.Tensor
) -> torch.Tensor:
    """(N,) bool: floor(``clip_cov_ratio`` N) tokens drawn from those with a covariance in
    [``clip_cov_lb``, ``clip_cov_ub``], all of them where there are fewer.

    ``covariances`` (N,) are those of all tokens of the mini-batch; -inf takes a token out of the
    draw, in which the smallest ``random_numbers`` (N,) win. Raises ValueError for a ratio outside
    [0, 1] or bounds that hold nothing.
    """
    lowest, highest = config.clip_cov_lb, config.clip_cov_ub
    if not lowest <= highest:
        raise ValueError(f"clip_cov_lb={lowest} is above clip_cov_ub={highest}")
    inside = (covariances >= lowest) & (covariances <= highest)
    candidates = inside.nonzero().squeeze(-1)
    count = _how_many(config.clip_cov_ratio, len(covariances), "clip_cov_ratio")
    selected = torch.zeros_like(inside)
    selected[candidates[random_numbers[candidates].argsort(stable=True)[:count]]] = True
    return selected


@register_policy_loss(
    "clip_cov",
    selection=TokenSelection(covariances=_clip_cov_covariances, choose=select_clip_cov_tokens),
)
def clip_cov_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    selected: torch.Tensor,
) -> PolicyLossTerms:
    """PPO's clipped loss per token, 0 without gradient where ``selected`` (B, R) bool is on.

    max(-A r, -A clip(r, 1 - low, 1 + high)) as in ``policy_losses``, no dual clip. ``clipped``
    marks the selected tokens and those that PPO's clip won.
    """
    low, high = clip_range(config)
    selected = selected.bool() & response_mask.bool()
    log_ratio = zero_outside_mask(log_prob - old_log_prob, response_mask)
    gains = zero_outside_mask(advantages, response_mask)
    ratio = clamped_ratio(log_ratio)
    plain, clipped = -gains * ratio, -gains * ratio.clamp(1 - low, 1 + high)
    loss = apply_is_weights(torch.maximum(plain, clipped), rollout_is_weights, response_mask)
    return policy_loss_terms(
        zero_outside_mask(loss, ~selected), log_ratio, (clipped > plain) | selected
    )


def select_kl_cov_tokens(
    covariances: torch.Tensor, config: Any, random_numbers: torch.Tensor
) -> torch.Tensor:
    """(N,) bool: the floor(``kl_cov_ratio`` N) tokens with the largest covariances.

    ``covariances`` (N,) are those of all tokens of the mini-batch; of equal ones those with the
    smallest ``random_numbers`` (N,) are taken. Raises ValueError for a ratio outside [0, 1].
    """
    count = _how_many(config.kl_cov_ratio, len(covariances), "kl_cov_ratio")
    order = random_numbers.argsort(stable=True)
    order = order[covariances[order].argsort(descending=True, stable=True)]
    selected = torch.zeros_like(covariances, dtype=torch.bool)
    selected[order[:count]] = True
    return selected


@register_policy_loss(
    "kl_cov",
    selection=TokenSelection(
        covariances=lambda _, new, gains, mask, __, sums: token_covariances(new, gains, mask, sums),
        choose=select_kl_cov_tokens,
    ),
)
def kl_cov_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    rollout_is_weights: torch.Tensor | None = None,
    *,
    selected: torch.Tensor,
) -> PolicyLossTerms:
    """-A r as in ``policy_losses``, plus ``ppo_kl_coef`` |l| where ``selected`` (B, R) bool is on.

    Nothing is clipped. |l| for the KL as in the authors' code.
    """
    log_ratio = zero_outside_mask(log_prob - old_log_prob, response_mask)
    gains = zero_outside_mask(advantages, response_mask)
    penalty = config.ppo_kl_coef * zero_outside_mask(log_ratio.abs(), selected)
    loss = -gains * clamped_ratio(log_ratio) + penalty
    return policy_loss_terms(apply_is_weights(loss, rollout_is_weights, response_mask), log_ratio)
