"""The clipped loss of a value model, and the explained variance of the returns."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ctrl_megatron.algorithms.masked import (
    masked_moment_sums,
    require_equal_shapes,
    zero_outside_mask,
)

# A variance below this share of the mean square is rounding.
_ROUNDING = 1e-12


class ValueLossTerms(NamedTuple):
    """(B, R) values, 0 off the mask."""

    loss: torch.Tensor
    """The loss of each token; the only tensor with a gradient."""
    clipped: torch.Tensor
    """1 where the clipped prediction has the larger error."""


def value_loss_terms(
    vpreds: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange_value: float,
) -> ValueLossTerms:
    """Per token: 0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2).

    ``vpreds`` v with a gradient, ``returns`` R, ``values`` v_old of the rollout, all (B, R); c =
    ``cliprange_value``. Nothing off the mask reaches a value or a gradient. Source: the PPO
    implementation of OpenAI Baselines; arXiv 2005.12729, section 3. Raises ValueError for a
    negative range and for shapes that differ.
    """
    require_equal_shapes(response_mask=response_mask, vpreds=vpreds, returns=returns, values=values)
    if not cliprange_value >= 0:
        raise ValueError(f"cliprange_value must be at least 0, got {cliprange_value}")
    new, target, old = (zero_outside_mask(x, response_mask) for x in (vpreds, returns, values))
    held = torch.clamp(new, old - cliprange_value, old + cliprange_value)
    plain, clipped = (new - target).square(), (held - target).square()
    return ValueLossTerms(
        loss=0.5 * torch.maximum(plain, clipped),
        clipped=(clipped > plain).to(vpreds.dtype),
    )


def explained_variance_sums(
    values: torch.Tensor, returns: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """(5,) float64 that add over the pieces of a batch; inputs (B, R).

    Tokens; sum and sum of squares of the returns; the same of the residuals returns - values.
    Raises ValueError for shapes that differ.
    """
    require_equal_shapes(response_mask=response_mask, values=values, returns=returns)
    total = masked_moment_sums(returns, response_mask)
    return torch.cat([total, masked_moment_sums(returns - values, response_mask)[1:]])


def explained_variance(sums: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns), of (5,) ``explained_variance_sums``.

    1 for a perfect value model, 0 for one that is as good as the mean return, negative for a worse
    one. NaN where the returns do not vary: there is nothing to explain.
    """
    count, mean, square, residual, residual_square = (float(x) for x in sums)
    if count == 0:
        return math.nan
    variance = square / count - (mean / count) ** 2
    if variance <= _ROUNDING * square / count:
        return math.nan
    return 1 - (residual_square / count - (residual / count) ** 2) / variance
