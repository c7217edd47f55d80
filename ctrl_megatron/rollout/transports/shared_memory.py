"""Weights in POSIX shared memory: how an engine reads them."""

from __future__ import annotations

import mmap
import os
import re
from collections import OrderedDict
from collections.abc import Iterator

import torch

from ctrl_megatron.parallel.hosts import SHARED_MEMORY
from ctrl_megatron.rollout.weight_chunks import WeightChunk, specs_of, tensor_at

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_KEPT_MAPPINGS = 5
"""A sender fills two or three segments in turn, and the same ones in every push."""


class SharedMemoryReceiver:
    """Reads chunks whose place is ``{"segment": name of a file in /dev/shm, "offsets": [bytes]}``.

    Segments stay mapped from one push to the next: mapping one costs more than reading it.
    """

    def __init__(self) -> None:
        # By device and inode; the most recently used mapping is last.
        self._mappings: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()

    def tensors(self, chunk: WeightChunk) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the segment. ValueError if the segment is missing or too small."""
        # By the file's name, because the resource tracker of multiprocessing.shared_memory would
        # remove the sender's segment when this process ends.
        name = chunk["place"]["segment"]
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a shared-memory segment")
        try:
            descriptor = os.open(os.path.join(SHARED_MEMORY, name), os.O_RDWR)
        except FileNotFoundError:
            raise ValueError(f"shared-memory segment {name} does not exist") from None
        try:
            memory = self._mapped(descriptor)
        finally:
            os.close(descriptor)
        for spec, offset in zip(specs_of(chunk), chunk["place"]["offsets"], strict=True):
            yield spec.name, tensor_at(memory, spec, offset)

    def _mapped(self, descriptor: int) -> torch.Tensor:
        """All bytes of an open segment, uint8."""
        status = os.fstat(descriptor)
        key = status.st_dev, status.st_ino
        if key not in self._mappings or len(self._mappings[key]) != status.st_size:
            # Writable only because torch requires it.
            mapped = mmap.mmap(descriptor, status.st_size)
            self._mappings[key] = torch.frombuffer(mapped, dtype=torch.uint8)
        self._mappings.move_to_end(key)
        while len(self._mappings) > _KEPT_MAPPINGS:
            self._mappings.popitem(last=False)
        return self._mappings[key]
