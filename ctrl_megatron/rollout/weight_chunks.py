"""Chunks of weights in POSIX shared memory: written by the trainer's ranks, read by an engine.

A chunk is plain data from the start. The very object that ``weight_chunk`` makes goes as JSON to
the engine's server, from there into the engine's worker processes, and is read by ``read_chunk``.
"""

from __future__ import annotations

import mmap
import os
import re
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import TypedDict

import torch

from ctrl_megatron.parallel.hosts import SHARED_MEMORY
from ctrl_megatron.types import TensorSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes in which weights travel."""
VLLM_BACKEND = "ctrl_shared_memory"
"""What vLLM calls this way of bringing weights."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_OURS = re.compile(r"ctrl-(\d+)-(\d+)-[^-]+-\d+")


class ChunkTensor(TypedDict):
    """A tensor's place in a segment: its bytes, contiguous, from byte ``offset`` on."""

    name: str
    """Its Hugging Face name."""
    dtype: str
    shape: Sequence[int]
    offset: int


class WeightChunk(TypedDict):
    """Whole tensors lying in the shared memory called ``segment`` (a file in /dev/shm)."""

    segment: str
    tensors: list[ChunkTensor]


def weight_chunk(segment: str, places: Iterable[tuple[TensorSpec, int]]) -> WeightChunk:
    """The chunk of tensors that lie at these byte offsets of ``segment``."""
    tensors: list[ChunkTensor] = [
        {"name": spec.name, "dtype": spec.dtype, "shape": spec.shape, "offset": offset}
        for spec, offset in places
    ]
    return {"segment": segment, "tensors": tensors}


def spec_bytes(spec: TensorSpec) -> int:
    """Bytes of the tensor; ValueError for a dtype that is not transferred."""
    if spec.dtype not in DTYPE_BYTES:
        raise ValueError(
            f"{spec.name}: dtype {spec.dtype!r} is not supported; known: {', '.join(DTYPE_BYTES)}"
        )
    return prod(spec.shape) * DTYPE_BYTES[spec.dtype]


def tensor_at(memory: torch.Tensor, spec: TensorSpec, offset: int) -> torch.Tensor:
    """The tensor whose bytes begin at ``offset`` of ``memory`` (uint8), as a view.

    ValueError if it does not lie inside, or not on a multiple of its dtype's size.
    """
    end = offset + spec_bytes(spec)
    if offset < 0 or offset % DTYPE_BYTES[spec.dtype] or end > len(memory):
        raise ValueError(
            f"{spec.name} at bytes {offset} to {end} does not fit a segment of {len(memory)} "
            f"bytes, or is not aligned to {spec.dtype}"
        )
    return memory[offset:end].view(getattr(torch, spec.dtype)).view(spec.shape)


class SharedSegment:
    """A piece of shared memory that this process may write; ``memory`` is a uint8 tensor.

    ``name`` leads to it from when it is created until ``remove_segment``, and again after
    ``publish``. The memory itself has no name and goes with the last process that has it mapped,
    however that process ends; nor does the size of /dev/shm bound it.
    """

    def __init__(self, name: str, size: int, *, create: bool) -> None:
        self.name = name
        if create:
            descriptor = os.memfd_create(name)
            os.posix_fallocate(descriptor, 0, size)
        else:
            descriptor = os.open(os.path.join(SHARED_MEMORY, name), os.O_RDWR)
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self.memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        if create:
            self.publish()

    def publish(self) -> None:
        """Let ``name`` lead to the memory; only in the process that created it."""
        # Who opens the link gets the memory itself, through this process's descriptor.
        target = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        os.symlink(target, os.path.join(SHARED_MEMORY, self.name))


def segment_names(count: int) -> list[str]:
    """New names for segments of this process, by which ``remove_segments`` knows them."""
    base = f"ctrl-{os.getpid()}-{_pid_namespace()}-{uuid.uuid4().hex[:12]}"
    return [f"{base}-{number}" for number in range(count)]


def remove_segment(name: str) -> None:
    """Remove the name; the memory goes when the last process lets go of it."""
    # Where a run fails, several processes clean up.
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(SHARED_MEMORY, name))


def remove_segments(made_by: Callable[[int], bool]) -> None:
    """Remove the segments of the processes that ``made_by`` is true of: killed ones could not.

    Other containers may share /dev/shm, and have process ids of their own: theirs stay.
    """
    here = _pid_namespace()
    for name in os.listdir(SHARED_MEMORY):
        ours = _OURS.fullmatch(name)
        if ours and int(ours[2]) == here and made_by(int(ours[1])):
            remove_segment(name)


def _pid_namespace() -> int:
    """Process ids say something only inside it."""
    return os.stat("/proc/self/ns/pid").st_ino


def read_chunk(chunk: WeightChunk) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (HF name, tensor) of the chunk, as views of the segment: copy before using them later.

    Attaches by the file's name, not through ``multiprocessing.shared_memory``, whose resource
    tracker would remove the writer's segment when this process ends. The views must not be written
    to. ValueError if the segment is missing or a tensor lies outside it.
    """
    name = chunk["segment"]
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a shared-memory segment")
    try:
        descriptor = os.open(os.path.join(SHARED_MEMORY, name), os.O_RDWR)
    except FileNotFoundError:
        raise ValueError(f"shared-memory segment {name} does not exist") from None
    try:
        memory = _mapped(descriptor)
    finally:
        os.close(descriptor)
    for tensor in chunk["tensors"]:
        yield tensor["name"], tensor_at(memory, spec_of(tensor), tensor["offset"])


_MAPPINGS: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()
"""What this process has mapped for reading by device and inode, the last used last."""
_KEPT_MAPPINGS = 2
"""A writer fills two segments in turn, and the same ones in every update."""


def _mapped(descriptor: int) -> torch.Tensor:
    """All bytes of an open segment, uint8. A new mapping costs more than reading it."""
    status = os.fstat(descriptor)
    key = status.st_dev, status.st_ino
    if key not in _MAPPINGS or len(_MAPPINGS[key]) != status.st_size:
        # Writable because torch wants it so; nothing is ever written.
        mapped = mmap.mmap(descriptor, status.st_size)
        _MAPPINGS[key] = torch.frombuffer(mapped, dtype=torch.uint8)
    _MAPPINGS.move_to_end(key)
    while len(_MAPPINGS) > _KEPT_MAPPINGS:
        _MAPPINGS.popitem(last=False)
    return _MAPPINGS[key]


def spec_of(tensor: ChunkTensor) -> TensorSpec:
    """What a chunk says of a tensor, without its place."""
    return TensorSpec(name=tensor["name"], dtype=tensor["dtype"], shape=tuple(tensor["shape"]))
