"""Sums, means and whitening over a mask. What a mask hides never matters, not even as NaN.

Masks are bool or numbers (anything but 0 selects) of the shape of the values. Values are replaced,
not multiplied, where the mask is off: 0 * NaN is NaN. Where no gradient is wanted, the bits of a
number are multiplied as those of an integer, by 0 or 1, which leaves nothing of a NaN either:
torch.where branches at every element on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_WHITEN_EPSILON = 1e-8
# Elements per block of rows: what is computed from one stays in a CPU's cache.
_BLOCK = 2**19 - 1
# Integers of a number's size in bytes.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values`` with zeros where ``mask`` is off; no gradient flows there."""
    return torch.where(mask.bool(), values, values.new_zeros(()))


def masked_copy(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``masked`` of floats of 2, 4 or 8 bytes, without gradient; (B, 1) values go to all tokens."""
    bits = _BITS[values.element_size()]
    return _octets(mask).to(bits).mul_(values.detach().view(bits)).view(values.dtype)


def row_counts(mask: torch.Tensor) -> torch.Tensor:
    """Elements that each row of (B, R) selects: (B,) int32."""
    octets = _octets(mask).split(_rows(mask))
    return torch.cat([part.sum(dim=-1, dtype=torch.int32) for part in octets])


def rows_with_any(mask: torch.Tensor) -> torch.Tensor:
    """Whether each row of (B, R) selects anything: (B,) bool."""
    if not mask.shape[-1]:
        return mask.new_zeros(len(mask), dtype=torch.bool)
    return _octets(mask).amax(dim=-1) > 0


def row_sums(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of each row of (B, R) under the mask: (B,) float64, without gradient."""
    sums = values.new_empty(len(values), dtype=torch.float64)
    blocks = zip(_wide_blocks(values, mask), sums.split(_rows(values)), strict=True)
    for wide, out in blocks:
        torch.sum(wide, dim=-1, out=out)
    return sums


def moment_sums(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Count, sum and sum of squares of the (B, R) values under the mask: (3,) float64.

    Pieces of a batch add up; ``moments`` turns the total into mean and variance. No gradient.
    """
    total = torch.zeros(3, dtype=torch.float64, device=values.device)
    total[0] = row_counts(mask).sum()
    for wide in _wide_blocks(values, mask):
        total[1:] += torch.stack([wide.sum(), wide.square_().sum()])
    return total


def moments(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, unbiased variance), float64 scalars, of (3,) ``moment_sums``; ValueError below two."""
    count, total, squares = sums.unbind()
    if count < 2:
        raise ValueError(f"a variance needs two elements under the mask, got {int(count)}")
    mean = total / count
    return mean, (squares - total * mean).clamp(min=0) / (count - 1)


def whiten_with(
    values: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor | float, var: torch.Tensor | float
) -> torch.Tensor:
    """(values - mean) / sqrt(var + 1e-8) under the mask, 0 elsewhere, in the values' dtype.

    ``mean`` and ``var`` are scalars of the whole batch, of which ``values`` may be a piece.
    """
    var = torch.as_tensor(var, dtype=torch.float64, device=values.device)
    scale = torch.rsqrt(var + _WHITEN_EPSILON)
    return masked((values - mean) * scale, mask)


def _wide_blocks(values: torch.Tensor, mask: torch.Tensor) -> Iterator[torch.Tensor]:
    """Blocks of rows of (B, R) ``values`` in float64, 0 where the mask is off, without gradient.

    Each takes the place of the one before: fresh memory costs page faults, which take longer than
    sums.
    """
    values = values.detach() if values.element_size() in _BITS else values.to(torch.float32)
    bits, step = _BITS[values.element_size()], _rows(values)
    kept = values.new_empty(min(step, len(values)), values.shape[-1])
    wide = torch.empty_like(kept, dtype=torch.float64)
    for part, octets in zip(values.view(bits).split(step), _octets(mask).split(step), strict=True):
        block = kept[: len(octets)]
        block.view(bits).copy_(octets).mul_(part)
        yield wide[: len(octets)].copy_(block)


def _octets(mask: torch.Tensor) -> torch.Tensor:
    """The mask as bytes of 0 and 1, on which CPUs have vector instructions."""
    return mask.bool().view(torch.uint8)


def _rows(values: torch.Tensor) -> int:
    """Rows of a block."""
    return max(1, _BLOCK // max(1, values.shape[-1]))


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
