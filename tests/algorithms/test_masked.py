from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from ragged_batches import normal, ragged_mask, seeds, spoil

from ctrl_megatron.algorithms import masked_whiten, zero_outside_mask
from ctrl_megatron.algorithms.masked import masked_mean, masked_moment_sums, masked_row_sums

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)


def selected(values: torch.Tensor, mask: torch.Tensor) -> list[float]:
    return [float(v) for v, m in zip(values.flatten(), mask.flatten(), strict=True) if m]


@given(seeds)
def test_moments_and_whitening_equal_plain_python(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask, values = ragged_mask(generator, 4, 6), normal(generator, 4, 6, 3.0)
    chosen = selected(values, mask)
    mean = sum(chosen) / len(chosen)
    var = sum((v - mean) ** 2 for v in chosen) / (len(chosen) - 1)
    assert float(masked_mean(values, mask)) == pytest.approx(mean, rel=1e-9, abs=1e-12)
    whitened = masked_whiten(spoil(values, mask), mask.float())
    expected = [(v - mean) / math.sqrt(var + 1e-8) for v in chosen]
    assert selected(whitened, mask) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert torch.all(whitened[~mask] == 0)
    kept = masked_whiten(values, mask, shift_mean=False)
    assert selected(kept, mask) == pytest.approx([e + mean for e in expected], rel=1e-6, abs=1e-9)


def test_pieces_whiten_with_the_moments_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    mask, values = ragged_mask(generator, 6, 5), normal(generator, 6, 5)
    cuts = (slice(0, 1), slice(1, 4), slice(4, 6))
    total = sum((masked_moment_sums(values[s], mask[s]) for s in cuts), torch.zeros(3).double())
    parts = [masked_whiten(values[s], mask[s], reduce=lambda _: total) for s in cuts]
    torch.testing.assert_close(torch.cat(parts), masked_whiten(values, mask))


def test_no_gradient_reaches_hidden_places() -> None:
    values = torch.tensor([[1.0, float("nan")]], requires_grad=True)
    mask = torch.tensor([[1, 0]])
    zero_outside_mask(values, mask).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 0.0]]


def test_too_few_elements_are_an_error_not_a_number() -> None:
    with pytest.raises(ValueError, match="selects no element"):
        masked_mean(torch.ones(2, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="two elements"):
        masked_whiten(torch.ones(1, 2), torch.tensor([[1, 0]]))


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_every_dtype_are_exact_in_float64(
    dtype: torch.dtype, mask_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    values, mask = normal(generator, 5, 7, 30.0).to(dtype), ragged_mask(generator, 5, 7)
    # Every other column of a larger tensor: numbers that do not follow each other in memory.
    hidden = torch.zeros(5, 14, dtype=dtype)[:, ::2]
    hidden.copy_(spoil(values, mask) if dtype.is_floating_point else values.where(mask, 10**6))
    expected = [math.fsum(selected(v, m)) for v, m in zip(values, mask, strict=True)]
    assert masked_row_sums(hidden, mask.to(mask_dtype)).tolist() == pytest.approx(
        expected, rel=1e-15
    )
    chosen = selected(values, mask)
    moments = [len(chosen), math.fsum(chosen), math.fsum(v * v for v in chosen)]
    assert masked_moment_sums(hidden, mask.to(mask_dtype)).tolist() == pytest.approx(
        moments, rel=1e-14
    )


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_nothing_sums_to_nothing(shape: tuple[int, int]) -> None:
    nothing = torch.zeros(shape)
    assert masked_row_sums(nothing, nothing).tolist() == [0.0] * shape[0]
    assert masked_moment_sums(nothing, nothing).tolist() == [0.0, 0.0, 0.0]
