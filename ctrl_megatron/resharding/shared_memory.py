"""Transport between processes of one host: two buckets of POSIX shared memory, used in turn."""

from __future__ import annotations

import mmap
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from ctrl_megatron.parallel.groups import Groups
from ctrl_megatron.resharding.plan import Slice, spec_bytes
from ctrl_megatron.resharding.sources import WeightSource

_FOLDER = "/dev/shm"


class Segment:
    """A named piece of shared memory as a uint8 tensor."""

    def __init__(self, name: str, size: int, *, create: bool) -> None:
        self.name, path = name, os.path.join(_FOLDER, name)
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
    for name in os.listdir(_FOLDER):
        parts = name.split("-")
        ours = parts[0] == "ctrl" and len(parts) == 4 and parts[1].isdigit()
        if ours and made_by(int(parts[1])):
            _unlink(name)


def _unlink(name: str) -> None:
    # The run's failure watch may have been faster.
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(_FOLDER, name))


def bucket_count(slices: Sequence[Slice]) -> int:
    """Number of buckets in which the tensors lie."""
    return 1 + max(s.bucket for s in slices)


def segment_size(slices: Sequence[Slice]) -> int:
    """Bytes of the fullest bucket."""
    return max(s.offset + spec_bytes(s.spec) for s in slices)


def require_one_host(groups: Groups) -> None:
    """ValueError if the ranks stand on several hosts: shared memory ends at a host's border."""
    hosts = sorted(set(groups.from_all(socket.gethostname())))
    if len(hosts) > 1:
        raise ValueError(
            "shared-memory weight sync needs all trainer ranks on the engine's host, found "
            f"{', '.join(hosts)}; it is single-host for now: start all ranks on one machine"
        )


@contextmanager
def segments(slices: Sequence[Slice], groups: Groups) -> Iterator[tuple[Segment, Segment]]:
    """Two segments that every rank has mapped. The names vanish at the end, also on an error.

    Raises ValueError if the ranks stand on several hosts.
    """
    require_one_host(groups)
    if groups.is_first:
        remove_segments(lambda pid: not os.path.exists(f"/proc/{pid}"))
    base = groups.from_first(f"ctrl-{os.getpid()}-{uuid.uuid4().hex[:12]}")
    names, size = [f"{base}-{i}" for i in range(2)], segment_size(slices)
    try:
        if groups.is_first:
            made = tuple(Segment(name, size, create=True) for name in names)
        groups.barrier()
        if not groups.is_first:
            made = tuple(Segment(name, size, create=False) for name in names)
        yield made  # type: ignore[misc]
    finally:
        if groups.is_first:
            # The memory goes when the last process lets go of it.
            for name in names:
                _unlink(name)


def stream(
    source: WeightSource,
    pair: tuple[Segment, Segment],
    groups: Groups,
    wait_until_free: Callable[[int], None] = lambda bucket: None,
) -> Iterator[tuple[int, Segment]]:
    """Yield (bucket, segment) once all ranks have filled it; collective over all ranks.

    On rank 0 ``wait_until_free(bucket)`` blocks until the reader has let go of ``bucket``; it is
    called before that bucket's segment is filled again.
    """
    for bucket in range(bucket_count(source.slices)):
        if bucket >= 2 and groups.is_first:
            wait_until_free(bucket - 2)
        groups.barrier()
        segment = pair[bucket % 2]
        source.fill(bucket, segment.memory)
        groups.barrier()
        yield bucket, segment
