"""Chunks of weights: whole tensors on their way from the trainer to an engine.

A chunk is plain data from the start. The object that ``weight_chunk`` returns goes as JSON to the
engine's server, from there to the engine's worker processes, and ``rollout.transports.read_chunk``
reads it there. Nothing on the way looks at ``place``, so it does not matter which medium carries
the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, TypedDict

import torch

from ctrl_megatron.types import TensorSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""The dtypes in which weights are sent, with the bytes of one element."""
VLLM_BACKEND = "ctrl_chunks"
"""The name under which vLLM knows our weight transfer."""


class ChunkTensor(TypedDict):
    """One tensor of a chunk; ``name`` is its Hugging Face name."""

    name: str
    dtype: str
    shape: Sequence[int]


class WeightChunk(TypedDict):
    """Whole tensors that an engine can read now."""

    receiver: str
    """The class that reads the chunk, as ``module:Class`` (``rollout.transports.Receiver``)."""
    tensors: list[ChunkTensor]
    place: dict[str, Any]
    """Where the tensors' bytes are, as JSON that only the two halves of the medium understand."""
    reader: int
    """The number of the engine among those of its host that read the same chunks."""


def weight_chunk(receiver: str, specs: Iterable[TensorSpec], place: dict[str, Any]) -> WeightChunk:
    """The chunk of the tensors ``specs``, which the half named ``receiver`` reads at ``place``."""
    tensors: list[ChunkTensor] = [
        {"name": spec.name, "dtype": spec.dtype, "shape": spec.shape} for spec in specs
    ]
    return {"receiver": receiver, "tensors": tensors, "place": place, "reader": 0}


def specs_of(chunk: WeightChunk) -> list[TensorSpec]:
    """Name, dtype and shape of every tensor in the chunk, in its order."""
    return [
        TensorSpec(name=t["name"], dtype=t["dtype"], shape=tuple(t["shape"]))
        for t in chunk["tensors"]
    ]


def spec_bytes(spec: TensorSpec) -> int:
    """Bytes of the tensor; ValueError for a dtype that is never sent."""
    if spec.dtype not in DTYPE_BYTES:
        raise ValueError(
            f"{spec.name}: dtype {spec.dtype!r} is not supported; known: {', '.join(DTYPE_BYTES)}"
        )
    return prod(spec.shape) * DTYPE_BYTES[spec.dtype]


def tensor_at(memory: torch.Tensor, spec: TensorSpec, offset: int) -> torch.Tensor:
    """The tensor whose bytes begin at ``offset`` of ``memory`` (uint8), as a view.

    ValueError if it exceeds ``memory`` or ``offset`` is not a multiple of its element size.
    """
    end = offset + spec_bytes(spec)
    if offset < 0 or offset % DTYPE_BYTES[spec.dtype] or end > len(memory):
        raise ValueError(
            f"{spec.name} at bytes {offset} to {end} does not fit memory of {len(memory)} bytes, "
            f"or is not aligned to {spec.dtype}"
        )
    return memory[offset:end].view(getattr(torch, spec.dtype)).view(spec.shape)
