"""The engine that sampled is not the trainer that learns: how far apart, and what to do about it.

With p the trainer's probability of a token (``old_log_probs``) and q the engine's
(``rollout_log_probs``), the token's ratio is p / q, the row's the product over its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ctrl_megatron.algorithms.masked import (
    clamp_log_ratio,
    masked_row_sums,
    require_equal_shapes,
    zero_outside_mask,
)

ROLLOUT_IS = ("none", "token", "sequence")
ROLLOUT_RS = ("none", "token", "sequence", "geometric")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedLossInputs:
    """Inputs of the policy loss after the correction."""

    weights: torch.Tensor | None
    """(B, R) importance weights for ``rollout_is_weights``, 0 off the mask; None without."""
    response_mask: torch.Tensor
    """(B, R) bool: the tokens that remain after rejection."""


@torch.no_grad()
def compute_rollout_correction(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    rollout_is: str = "none",
    rollout_is_threshold: float = 2.0,
    rollout_rs: str = "none",
    rollout_rs_threshold: float = 2.0,
    rollout_rs_threshold_lower: float | None = None,
) -> CorrectedLossInputs:
    """Importance weights and rejection by the ratios of trainer and engine; inputs (B, R).

    ``rollout_is``: weights min(ratio, ``rollout_is_threshold``), of the token or of its whole row
    (truncated importance sampling). ``rollout_rs``: tokens with a ratio outside
    [``rollout_rs_threshold_lower``, ``rollout_rs_threshold``] are dropped; for ``sequence`` whole
    rows by their ratio, for ``geometric`` whole rows by its T-th root. The lower threshold is
    1 / upper where it is None. Log-ratios are bounded to +-20, those of rows too. Weights are those
    before rejection. Rows must be whole. Sources: Espeholt et al., arXiv 1802.01561, section 4.1
    (truncation); Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training" (2025).

    Raises ValueError for an unknown kind, thresholds that keep nothing, or shapes that differ.
    """
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, response_mask)
    kinds = (("rollout_is", rollout_is, ROLLOUT_IS), ("rollout_rs", rollout_rs, ROLLOUT_RS))
    for key, value, known in kinds:
        if value not in known:
            raise ValueError(f"unknown {key} {value!r}; known: {', '.join(known)}")
    weights, kept = None, response_mask.bool()
    if rollout_is != "none":
        if not rollout_is_threshold > 0:
            raise ValueError(f"rollout_is_threshold must be positive, got {rollout_is_threshold}")
        ratio = _ratio(log_ratio, response_mask, rollout_is).clamp(max=rollout_is_threshold)
        weights = zero_outside_mask(ratio, response_mask)
    if rollout_rs != "none":
        upper = rollout_rs_threshold
        if not upper > 0:
            raise ValueError(f"rollout_rs_threshold must be positive, got {upper}")
        lower = 1 / upper if rollout_rs_threshold_lower is None else rollout_rs_threshold_lower
        if not lower <= upper:
            raise ValueError(
                f"rollout_rs_threshold={upper} is below the lower threshold {lower}; no ratio is "
                "between them"
            )
        ratio = _ratio(log_ratio, response_mask, rollout_rs)
        kept = kept & (ratio >= lower) & (ratio <= upper)
    return CorrectedLossInputs(weights=weights, response_mask=kept)


class RolloutMismatchSums(NamedTuple):
    """Statistics of the mismatch between trainer and engine in a piece of a batch."""

    sums: torch.Tensor
    """(7,) float64 that add over pieces: tokens, |p - q|, k3, weights, squared weights, weights at
    the threshold, rejected tokens."""
    largest: torch.Tensor
    """Largest |p - q|, float64 scalar, of which the pieces' maximum counts; 0 without tokens."""


@torch.no_grad()
def rollout_mismatch_sums(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    correction: CorrectedLossInputs | None = None,
    rollout_is_threshold: float | None = None,
) -> RolloutMismatchSums:
    """Sums over the tokens under the mask of (B, R) log-probs.

    The weights are those of ``correction``, or the token ratios where it has none.
    ``rollout_is_threshold`` is the one that truncated them. The mask is the one before rejection.
    """
    on = response_mask.bool()
    # In float64: at a ratio near 1 the terms of k3 cancel.
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, on).double()
    ratio = log_ratio.exp()
    difference = zero_outside_mask(old_log_probs.exp() - rollout_log_probs.exp(), on).abs()
    given = None if correction is None else correction.weights
    weights = zero_outside_mask(ratio if given is None else given, on)
    cut = torch.zeros_like(on)
    if given is not None and rollout_is_threshold is not None:
        cut = on & (weights >= rollout_is_threshold)
    rejected = torch.zeros_like(on) if correction is None else on & ~correction.response_mask
    parts = (
        *(on, difference, ratio - 1 - log_ratio),
        *(weights, weights.double().square(), cut, rejected),
    )
    sums = torch.stack([masked_row_sums(part, on).sum() for part in parts])
    largest = difference.max() if difference.numel() else difference.new_zeros(())
    return RolloutMismatchSums(sums=sums, largest=largest.double())


def rollout_mismatch_metrics(total: RolloutMismatchSums) -> dict[str, float]:
    """Scalars of the whole batch from the added ``sums`` and the maximum of ``largest``.

    - ``rollout/probs_diff_mean``, ``rollout/probs_diff_max``: of |p - q| over tokens.
    - ``rollout/kl``: k3 estimate of KL(q || p) per token.
    - ``rollout/ess``: (sum of weights)^2 / (tokens * sum of squared weights): the share of the
      tokens that an unweighted sample of the same variance would have, in (0, 1].
    - ``rollout/is_mean``, ``rollout/is_truncated``: mean weight, share of truncated weights.
    - ``rollout/rejected``: share of rejected tokens.

    Raises ValueError if there is no token.
    """
    tokens, difference, kl, weight, squared, cut, rejected = (float(x) for x in total.sums)
    if tokens == 0:
        raise ValueError("no response token to compare trainer and engine on")
    return {
        "rollout/probs_diff_mean": difference / tokens,
        "rollout/probs_diff_max": float(total.largest),
        "rollout/kl": kl / tokens,
        "rollout/ess": weight * weight / (tokens * squared),
        "rollout/is_mean": weight / tokens,
        "rollout/is_truncated": cut / tokens,
        "rollout/rejected": rejected / tokens,
    }


def _log_ratio(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    require_equal_shapes(response_mask=mask, old_log_probs=old, rollout_log_probs=rollout)
    return clamp_log_ratio(zero_outside_mask(old - rollout, mask))


def _ratio(log_ratio: torch.Tensor, mask: torch.Tensor, kind: str) -> torch.Tensor:
    """(B, R) or (B, 1) ratios of a kind."""
    if kind == "token":
        return log_ratio.exp()
    rows = log_ratio.sum(dim=-1, keepdim=True)
    if kind == "geometric":
        rows = rows / mask.bool().sum(dim=-1, keepdim=True).clamp(min=1)
    return clamp_log_ratio(rows).exp()
