"""Parts of tensors that lie behind each other in one piece of memory: a worker of an engine gets
only the rectangles with which it computes, and makes from them what its loaders expect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ctrl_megatron.rollout.weight_chunks import tensor_at
from ctrl_megatron.types import TensorSpec


class PackedPart(NamedTuple):
    """A rectangle of a chunk's tensor; goes through JSON as a list."""

    tensor: int
    """The number of the tensor in its chunk."""
    start: Sequence[int]
    """Its first index in the whole tensor."""
    extent: Sequence[int]
    offset: int
    """Its first byte in the memory."""


def unpack_tensors(
    specs: Sequence[TensorSpec], parts: Iterable[tuple[torch.Tensor, PackedPart]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor of its whole shape) of all ``specs``, from (memory, part in it).

    Only the parts have values; the rest of a tensor was never written. A tensor that is one part as
    a whole is a view of the memory. One tensor at a time takes new memory.
    """
    of_tensor: list[list[tuple[torch.Tensor, PackedPart]]] = [[] for _ in specs]
    for memory, part in parts:
        of_tensor[part.tensor].append((memory, part))
    for spec, own in zip(specs, of_tensor, strict=True):
        whole: torch.Tensor | None = None
        for memory, part in own:
            extent = tuple(part.extent)
            values = tensor_at(
                memory, TensorSpec(name=spec.name, dtype=spec.dtype, shape=extent), part.offset
            )
            if extent == spec.shape:
                whole = values
                break
            if whole is None:
                whole = values.new_empty(spec.shape)
            ends = zip(part.start, extent, strict=True)
            whole[tuple(slice(first, first + count) for first, count in ends)] = values
        if whole is None:
            # The worker's loaders read nothing of it.
            whole = torch.empty(1, dtype=getattr(torch, spec.dtype)).expand(spec.shape)
        yield spec.name, whole
