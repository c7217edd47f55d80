"""One check of shapes for everything that takes several tensors.

PyTorch broadcasts: (B,) beside (B, R) with as many rows as columns would give wrong numbers.
"""

from __future__ import annotations

import torch


def check_shapes(rank: int | None = 2, /, **tensors: torch.Tensor | None) -> None:
    """All ``tensors`` have the shape of the first, which has ``rank`` dimensions; None is left out.

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
