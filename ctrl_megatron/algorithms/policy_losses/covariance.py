"""How much a token moves the entropy: the covariance of its log-prob and its advantage.

The selections look at all tokens of a mini-batch at once. Who holds a piece of it adds
``covariance_sums`` over the pieces, gathers ``token_covariances`` under the mask, selects among the
gathered, and gives each piece its part as ``selected``.
"""

from __future__ import annotations

import math

import torch

from ctrl_megatron.algorithms.masked import masked, row_counts, row_sums
from ctrl_megatron.algorithms.shapes import check_shapes


def covariance_sums(
    log_prob: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """(3,) float64 that add over pieces: tokens, sum of log-probs, sum of advantages.

    Inputs (B, R). Raises ValueError for shapes that differ.
    """
    check_shapes(response_mask=response_mask, log_prob=log_prob, advantages=advantages)
    tokens = row_counts(response_mask).sum().to(torch.float64)
    total = [row_sums(values, response_mask).sum() for values in (log_prob, advantages)]
    return torch.stack([tokens, *total])


@torch.no_grad()
def token_covariances(
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """(log_prob - mean) (advantage - mean) of each token: (B, R) float64, 0 off the mask.

    The means are those of ``sums``, the ``covariance_sums`` of the whole mini-batch; None for those
    of these rows. Source: arXiv 2505.22617, section 4.2. Raises ValueError for shapes that differ.
    """
    check_shapes(response_mask=response_mask, log_prob=log_prob, advantages=advantages)
    if sums is None:
        sums = covariance_sums(log_prob, advantages, response_mask)
    mean_log_prob, mean_advantage = sums[1:] / sums[0].clamp(min=1)
    product = (log_prob.double() - mean_log_prob) * (advantages.double() - mean_advantage)
    return masked(product, response_mask)


def how_many(ratio: float, tokens: int, key: str) -> int:
    """floor(``ratio`` * ``tokens``), but at least one token unless the ratio or the batch is 0.

    Raises ValueError naming ``key`` for a ratio outside [0, 1].
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"{key} must lie in [0, 1], got {ratio}")
    return min(tokens, max(1, math.floor(ratio * tokens))) if ratio else 0


def select_clip_cov(
    covariances: torch.Tensor,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """(N,) bool: floor(ratio N) tokens drawn from those with lb <= covariance <= ub.

    All of them where there are fewer. ``covariances`` (N,) are those of all tokens of the
    mini-batch; -inf takes a token out of the draw. ``generator`` (a CPU generator; None for torch's
    own) must be in the same state on every rank that draws. Raises ValueError for a ratio outside
    [0, 1] or bounds that hold nothing.
    """
    if not clip_cov_lb <= clip_cov_ub:
        raise ValueError(f"clip_cov_lb={clip_cov_lb} is above clip_cov_ub={clip_cov_ub}")
    inside = (covariances >= clip_cov_lb) & (covariances <= clip_cov_ub)
    candidates = inside.nonzero().squeeze(-1)
    count = how_many(clip_cov_ratio, len(covariances), "clip_cov_ratio")
    drawn = torch.randperm(len(candidates), generator=generator)[:count]
    selected = torch.zeros_like(inside)
    selected[candidates[drawn.to(candidates.device)]] = True
    return selected


def select_kl_cov(covariances: torch.Tensor, kl_cov_ratio: float) -> torch.Tensor:
    """(N,) bool: the floor(ratio N) tokens with the largest covariances.

    ``covariances`` (N,) are those of all tokens of the mini-batch. Raises ValueError for a ratio
    outside [0, 1].
    """
    count = how_many(kl_cov_ratio, len(covariances), "kl_cov_ratio")
    if count == 0:
        return torch.zeros_like(covariances, dtype=torch.bool)
    least = covariances.topk(count).values[-1]
    selected = covariances > least
    # Of equal covariances the first ones, so that every rank takes the same tokens.
    ties = (covariances == least).nonzero().squeeze(-1)
    selected[ties[: count - int(selected.sum())]] = True
    return selected


def over_tokens(selected: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(B, R) bool of the (N,) choice among the tokens under the mask, in row order."""
    spread = torch.zeros_like(response_mask, dtype=torch.bool)
    spread[response_mask.bool()] = selected
    return spread
