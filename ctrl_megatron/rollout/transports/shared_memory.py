"""Weights in POSIX shared memory: how an engine reads them."""

from __future__ import annotations

import mmap
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ctrl_megatron.parallel.hosts import SHARED_MEMORY
from ctrl_megatron.rollout.device_memory import lock_pages
from ctrl_megatron.rollout.weight_chunks import WeightChunk, specs_of, tensor_at

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_KEPT_MAPPINGS = 8
"""A sender fills three segments in turn, and the same ones in every push; those of a small proxy's
kept weights come on top."""


class SharedMemoryReceiver:
    """Reads chunks whose place is ``{"segments": [name of a file in /dev/shm on each host of the
    engine, or for each worker on its host], "workers": number of workers that have segments of
    their own, "offsets": [bytes], "locked": number of a segment's first bytes that are page-locked
    for copies to a GPU}``.

    In a segment of a worker's own the tensors have their whole shapes, but of each only the part
    that this worker's loaders take has a value; the rest is memory that was never written.
    Segments stay mapped from one push to the next: mapping one costs more than reading it.
    """

    def __init__(self, number: Callable[[], tuple[int, int]] | None = None) -> None:
        """``number`` is ``worker_index_and_count`` by default."""
        self._number = number or worker_index_and_count
        # By device and inode, with what undoes the lock; the most recently used mapping is last.
        self._mappings: OrderedDict[tuple[int, int], tuple[torch.Tensor, Callable[[], None]]]
        self._mappings = OrderedDict()

    def tensors(self, chunk: WeightChunk) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the segment. ValueError if the segment is missing or too small, or if the
        chunk is cut for an engine of another size."""
        # By the file's name, because the resource tracker of multiprocessing.shared_memory would
        # remove the sender's segment when this process ends.
        place, (worker, size) = chunk["place"], self._number()
        if place["workers"] not in (None, size):
            raise ValueError(
                f"the chunk is cut for an engine of {place['workers']} workers; this one has {size}"
            )
        name = place["segments"][worker * len(place["segments"]) // size]
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a shared-memory segment")
        try:
            descriptor = os.open(os.path.join(SHARED_MEMORY, name), os.O_RDWR)
        except FileNotFoundError:
            raise ValueError(f"shared-memory segment {name} does not exist") from None
        try:
            memory = self._mapped(descriptor, place["locked"])
        finally:
            os.close(descriptor)
        for spec, offset in zip(specs_of(chunk), place["offsets"], strict=True):
            yield spec.name, tensor_at(memory, spec, offset)

    def _mapped(self, descriptor: int, locked: int) -> torch.Tensor:
        """All bytes of an open segment, uint8."""
        status = os.fstat(descriptor)
        key = status.st_dev, status.st_ino
        if key in self._mappings and len(self._mappings[key][0]) != status.st_size:
            self._drop(key)
        if key not in self._mappings:
            # Writable only because torch requires it.
            mapped = mmap.mmap(descriptor, status.st_size)
            memory = torch.frombuffer(mapped, dtype=torch.uint8)
            self._mappings[key] = memory, lock_pages(memory[:locked])
        self._mappings.move_to_end(key)
        while len(self._mappings) > _KEPT_MAPPINGS:
            self._drop(next(iter(self._mappings)))
        return self._mappings[key][0]

    def _drop(self, key: tuple[int, int]) -> None:
        _, unlock = self._mappings.pop(key)
        unlock()


def worker_index_and_count() -> tuple[int, int]:
    """(number of this process among the workers of its engine, their number)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
