"""Reads the tensors of a chunk from shared memory."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from math import prod

import torch

from ctrl_megatron.rollout.engine import Chunk, Slot

_FOLDER = "/dev/shm"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def _tensor(memory: mmap.mmap, slot: Slot, segment: str) -> torch.Tensor:
    dtype = getattr(torch, slot.spec.dtype)
    count = prod(slot.spec.shape)
    end = slot.offset + count * dtype.itemsize
    if slot.offset < 0 or slot.offset % dtype.itemsize or end > len(memory):
        raise ValueError(
            f"{slot.spec.name} at bytes {slot.offset} to {end} does not fit segment {segment} "
            f"of {len(memory)} bytes, or is not aligned to {slot.spec.dtype}"
        )
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=slot.offset)
    return flat.view(slot.spec.shape)


def open_chunk(chunk: Chunk) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (HF name, tensor) for each slot, as views of the segment: copy before using them later.

    Attaches by the file's name, not through ``multiprocessing.shared_memory``, whose resource
    tracker would remove the producer's segment when this process ends. The views must not be
    written to.
    ValueError if the segment is missing or a slot lies outside it.
    """
    if not _NAME.fullmatch(chunk.segment):
        raise ValueError(f"{chunk.segment!r} is no name of a shared-memory segment")
    try:
        descriptor = os.open(os.path.join(_FOLDER, chunk.segment), os.O_RDONLY)
    except FileNotFoundError:
        raise ValueError(f"shared-memory segment {chunk.segment} does not exist") from None
    try:
        # Copy-on-write, since torch wants writable memory; nothing is ever written.
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    for slot in chunk.slots:
        yield slot.spec.name, _tensor(memory, slot, chunk.segment)
