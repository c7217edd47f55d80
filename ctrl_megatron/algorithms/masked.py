"""Shapes, sums, means and whitening under a mask. Masked-out values have no effect, even NaN.

Masks are bool or numbers, of which anything but 0 selects. Values are replaced, not multiplied,
where the mask is off: 0 * NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_WHITEN_EPSILON = 1e-8
_LOG_RATIO_BOUND = 20.0

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""(K,) float64 sums of a piece of a batch -> the sums over all pieces."""


def identity_reduce(sums: torch.Tensor) -> torch.Tensor:
    """``sums`` itself: the ``Reduce`` of a caller that has the whole batch."""
    return sums


def clamp_log_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """``log_ratio``, of any shape, clamped to +-20. Larger ratios carry no further information;
    their products would overflow, and a backward pass would compute inf * 0."""
    return log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)


def require_equal_shapes(rank: int | None = 2, /, **tensors: torch.Tensor | None) -> None:
    """Require that all ``tensors`` have the shape of the first, which has ``rank`` dimensions.

    None is skipped. PyTorch would broadcast (B,) to (B, R) where B = R, and give wrong numbers.
    Raises ValueError naming the argument, its shape and the one it should have. Reads no values.
    """
    (first, model), *rest = tensors.items()
    assert model is not None
    if rank is not None and model.dim() != rank:
        raise ValueError(
            f"{first} has shape {tuple(model.shape)}; expected (rows, tokens), {rank} dimensions"
        )
    for name, tensor in rest:
        if tensor is not None and tensor.shape != model.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; expected {tuple(model.shape)}, that of "
                f"{first}"
            )


def zero_outside_mask(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values`` with zeros where ``mask`` is off; no gradient flows there."""
    return torch.where(mask.bool(), values, values.new_zeros(()))


def masked_row_sums(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of each row of (B, R) under the mask: (B,) float64, without gradient."""
    return zero_outside_mask(values.detach(), mask).double().sum(dim=-1)


def masked_moment_sums(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Count, sum and sum of squares of the values under the mask: (3,) float64, without gradient.

    Those of the pieces of a batch add up to those of the whole.
    """
    wide = zero_outside_mask(values.detach(), mask).double()
    return torch.stack([mask.bool().sum().double(), wide.sum(), wide.square().sum()])


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the values under the mask, a scalar; ValueError if it selects none."""
    count = mask.bool().sum()
    if count == 0:
        raise ValueError("the mask selects no element; a mean over nothing is undefined")
    return zero_outside_mask(values, mask).sum() / count


def masked_whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    shift_mean: bool = True,
    *,
    reduce: Reduce = identity_reduce,
) -> torch.Tensor:
    """(values - mean) / sqrt(variance + 1e-8) under the mask, 0 elsewhere, in the values' dtype.

    Mean and unbiased variance are those of the whole batch: who holds a piece of it gives
    ``reduce``. Without ``shift_mean`` the mean is added again. ValueError if the mask selects fewer
    than two elements in all.
    """
    count, total, squares = reduce(masked_moment_sums(values, mask)).unbind()
    if count < 2:
        raise ValueError(f"a variance needs two elements under the mask, got {int(count)}")
    mean = total / count
    variance = (squares - total * mean).clamp(min=0) / (count - 1)
    whitened = (values - mean) * torch.rsqrt(variance + _WHITEN_EPSILON)
    return zero_outside_mask(whitened if shift_mean else whitened + mean, mask)
