"""Triton kernels of the softmax over the vocabulary: each reads a tile's logits once, where torch's
operations read or write them a dozen times. ``parallel.vocab`` is their oracle and computes the
same on a CPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_BLOCK = 4096
"""Columns of a row that a program has in registers."""
_WARPS = 8


@triton.jit
def _statistics(logits, peaks, sums, weighted, stride, columns, scale, BLOCK: tl.constexpr):  # type: ignore[valid-type]
    """One program for each row: online over blocks of columns (arXiv 1805.02867)."""
    row = tl.program_id(0).to(tl.int64)
    peak = -float("inf")
    total = 0.0
    bits_total = 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z = tl.load(logits + row * stride + column, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(z, axis=0))
        down = tl.where(total > 0, (peak - higher) * scale, 0.0)
        factor = tl.exp2(down)
        bits = (z - higher) * scale
        power = tl.exp2(bits)
        bits_total = (bits_total + down * total) * factor
        bits_total += tl.sum(tl.where(inside, power * bits, 0.0), axis=0)
        total = total * factor + tl.sum(power, axis=0)
        peak = higher
    tl.store(peaks + row, peak)
    tl.store(sums + row, total)
    tl.store(weighted + row, bits_total)


@triton.jit
def _gradient(
    logits,
    out,
    peaks,
    constants,
    slopes,
    targets,
    hits,
    stride,
    columns,
    scale,
    SLOPE: tl.constexpr,  # type: ignore[valid-type]
    BLOCK: tl.constexpr,  # type: ignore[valid-type]
):
    """One program for each row and block of columns: 2^b (constant + slope b), and hit at the
    target, where b = (z - peak) scale."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = row * stride + column
    z = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    bits = (z - tl.load(peaks + row)) * scale
    factor = tl.load(constants + row) + tl.zeros_like(bits)
    if SLOPE:
        factor += tl.load(slopes + row) * bits
    value = tl.exp2(bits) * factor
    value += tl.where(column == tl.load(targets + row), tl.load(hits + row), 0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def softmax_statistics(
    logits_TV: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(largest logit z, sum of 2^b, sum of 2^b b) of each row, three (T,) float32, where
    b = (z - largest) ``scale``. Logits (T, V) in any float dtype, rows contiguous."""
    rows, columns = logits_TV.shape
    found = logits_TV.new_empty((3, rows), dtype=torch.float32)
    arguments = (logits_TV, *found, logits_TV.stride(0), columns, scale)
    _statistics[(rows,)](*arguments, BLOCK=_BLOCK, num_warps=_WARPS)
    peak_T, sum_T, weighted_T = found
    return peak_T, sum_T, weighted_T


def write_softmax_gradient(
    logits_TV: torch.Tensor,
    peak_T: torch.Tensor,
    constant_T: torch.Tensor,
    slope_T: torch.Tensor | None,
    targets_T: torch.Tensor,
    hit_T: torch.Tensor,
    scale: float,
) -> None:
    """Overwrite each logit (T, V) with 2^b (constant + slope b), plus ``hit_T`` in the column
    ``targets_T``, if the row has that column; b = (z - peak) ``scale``. Vectors are (T,) float32,
    the targets int64."""
    rows, columns = logits_TV.shape
    vectors = (peak_T, constant_T, constant_T if slope_T is None else slope_T, targets_T, hit_T)
    _gradient[(rows, triton.cdiv(columns, _BLOCK))](
        logits_TV,
        logits_TV,
        *(vector.contiguous() for vector in vectors),
        logits_TV.stride(0),
        columns,
        scale,
        SLOPE=slope_T is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
