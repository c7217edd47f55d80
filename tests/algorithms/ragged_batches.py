"""Random ragged batches, and how the tests of this folder read them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import strategies as st

from ctrl_megatron.algorithms import get_adv_estimator
from ctrl_megatron.config.options import explicit_parameters

seeds = st.integers(min_value=0, max_value=2**31 - 1)


def ragged_mask(generator: torch.Generator, rows: int, width: int) -> torch.Tensor:
    """(rows, width) bool with holes; some rows may be empty, the whole never is."""
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    mask = torch.arange(width)[None] < lengths
    mask &= torch.rand(rows, width, generator=generator) < 0.9
    mask[0, :2] = True
    return mask


def normal(generator: torch.Generator, rows: int, width: int, scale: float = 1.0) -> torch.Tensor:
    """Float64 noise."""
    return torch.randn(rows, width, generator=generator, dtype=torch.float64) * scale


def tokens(mask: torch.Tensor, row: int) -> Iterator[int]:
    """The valid columns of a row."""
    return (t for t in range(mask.shape[1]) if mask[row, t])


def spoil(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values`` with NaN and infinities wherever the mask is off."""
    junk = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=values.dtype)
    noise = junk.repeat(values.numel() // 3 + 1)[: values.numel()].reshape(values.shape)
    return torch.where(mask, values, noise)


def pieces(rows: int, sizes: list[int]) -> list[slice]:
    """Consecutive slices of at most the given sizes, repeated until all rows are covered."""
    found, start, turn = [], 0, 0
    while start < rows:
        found.append(slice(start, start + sizes[turn % len(sizes)]))
        start, turn = found[-1].stop, turn + 1
    return found


def leaves_as_it_is(_sums: torch.Tensor) -> torch.Tensor:
    """A ``reduce`` of moments with mean 0 and a variance that make whitening the identity."""
    return torch.tensor([2.0, 0.0, 1 - 1e-8], dtype=torch.float64)


def estimator_inputs(name: str) -> set[str]:
    """Names of the tensors and options that the advantage estimator reads."""
    return {*explicit_parameters(get_adv_estimator(name))} - {"reduce"}
