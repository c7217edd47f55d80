"""Sums, means and whitening over a mask. What a mask hides never matters, not even as NaN.

Masks are bool or numbers (anything but 0 selects) of the shape of the values. Values are replaced,
not multiplied, where the mask is off: 0 * NaN is NaN.
"""

from __future__ import annotations

import torch

_WHITEN_EPSILON = 1e-8


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values`` with zeros where ``mask`` is off; no gradient flows there."""
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the values under the mask, a scalar; ValueError if it selects none."""
    count = mask.bool().sum()
    if count == 0:
        raise ValueError("the mask selects no element; a mean over nothing is undefined")
    return masked(values, mask).sum() / count


def masked_var(
    values: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor | None = None
) -> torch.Tensor:
    """Unbiased variance under the mask, around ``mean`` where it is known; ValueError below two."""
    count = mask.bool().sum()
    if count < 2:
        raise ValueError(f"a variance needs two elements under the mask, got {int(count)}")
    centre = masked_mean(values, mask) if mean is None else mean
    return masked((values - centre).square(), mask).sum() / (count - 1)


def masked_whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    shift_mean: bool = True,
    *,
    mean: torch.Tensor | None = None,
    var: torch.Tensor | None = None,
) -> torch.Tensor:
    """Values scaled to variance 1 under the mask and, with ``shift_mean``, shifted to mean 0.

    ``mean`` and ``var`` are those of the elements under the mask; who whitens a piece of a batch
    passes the whole batch's. Zeros off the mask. ValueError below two elements without ``var``.
    """
    if mean is None:
        mean = masked_mean(values, mask)
    if var is None:
        var = masked_var(values, mask, mean)
    whitened = (values - mean) * torch.rsqrt(var + _WHITEN_EPSILON)
    return masked(whitened if shift_mean else whitened + mean, mask)
