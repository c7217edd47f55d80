"""Buckets that the processes of a host share: two pieces of POSIX shared memory, used in turn."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from ctrl_megatron.parallel.groups import Groups
from ctrl_megatron.parallel.hosts import SHARED_MEMORY
from ctrl_megatron.resharding.between_hosts import exchange
from ctrl_megatron.resharding.plan import Slice, spec_bytes
from ctrl_megatron.resharding.sources import WeightSource


class Segment:
    """A named piece of shared memory as a uint8 tensor."""

    def __init__(self, name: str, size: int, *, create: bool) -> None:
        self.name, path = name, os.path.join(SHARED_MEMORY, name)
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)


def remove_segments(made_by: Callable[[int], bool]) -> None:
    """Remove the segments of the processes that ``made_by`` is true of: killed ones could not."""
    for name in os.listdir(SHARED_MEMORY):
        parts = name.split("-")
        ours = parts[0] == "ctrl" and len(parts) == 4 and parts[1].isdigit()
        if ours and made_by(int(parts[1])):
            _unlink(name)


def _unlink(name: str) -> None:
    # The run's failure watch may have been faster.
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(SHARED_MEMORY, name))


def bucket_count(slices: Sequence[Slice]) -> int:
    """Number of buckets in which the tensors lie."""
    return 1 + max(s.bucket for s in slices)


def segment_size(slices: Sequence[Slice]) -> int:
    """Bytes of the fullest bucket."""
    return max(s.offset + spec_bytes(s.spec) for s in slices)


@contextmanager
def segments(slices: Sequence[Slice], groups: Groups) -> Iterator[tuple[Segment, Segment]]:
    """Two segments on every host, which each of its ranks has mapped. The names vanish at the end,
    also on an error."""
    if groups.is_first_here:
        remove_segments(lambda pid: not os.path.exists(f"/proc/{pid}"))
    base = groups.from_first_here(f"ctrl-{os.getpid()}-{uuid.uuid4().hex[:12]}")
    names, size = [f"{base}-{i}" for i in range(2)], segment_size(slices)
    try:
        if groups.is_first_here:
            made = tuple(Segment(name, size, create=True) for name in names)
        groups.barrier()
        if not groups.is_first_here:
            made = tuple(Segment(name, size, create=False) for name in names)
        yield made  # type: ignore[misc]
    finally:
        if groups.is_first_here:
            # The memory goes when the last process lets go of it.
            for name in names:
                _unlink(name)


def stream(
    source: WeightSource,
    pair: tuple[Segment, Segment],
    groups: Groups,
    wait_until_free: Callable[[int], None] = lambda bucket: None,
) -> Iterator[tuple[int, Segment]]:
    """Yield (bucket, segment) once it is full on every host that reads it. Collective.

    ``wait_until_free(bucket)`` blocks until the reader beside this rank has let go of ``bucket``;
    it is called before that bucket's segment is filled again.
    """
    for bucket in range(bucket_count(source.slices)):
        if bucket >= 2:
            wait_until_free(bucket - 2)
        groups.barrier()
        segment = pair[bucket % 2]
        source.fill(bucket, segment.memory)
        groups.barrier()
        inside = [s for s in source.slices if s.bucket == bucket]
        if any(place.routes for place in inside):
            if groups.is_first_here:
                exchange(inside, segment.memory, groups)
            groups.barrier()
        yield bucket, segment
