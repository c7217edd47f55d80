"""Weights in POSIX shared memory: how the ranks of a host write them.

Every host has a segment for each bucket in flight, or one for each worker number of an engine: its
engines share them. They are created for the first push and kept, because memory that the system
provides anew takes several times as long to fill.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.parallel.hosts import SHARED_MEMORY, own_segment_prefix, pid_namespace
from ctrl_megatron.resharding.buckets import Buckets, HostBuckets, push_through_host
from ctrl_megatron.resharding.plan import one_engine_of_each_host, receiving_ranks_of_engines
from ctrl_megatron.resharding.schedule import IN_FLIGHT
from ctrl_megatron.resharding.sources import WeightSource
from ctrl_megatron.resharding.transports import ReadableBucket
from ctrl_megatron.rollout.device_memory import lock_pages
from ctrl_megatron.rollout.weight_chunks import WeightChunk, weight_chunk

_RECEIVER = "ctrl_megatron.rollout.transports.shared_memory:SharedMemoryReceiver"
_OURS = re.compile(r"ctrl-(\d+)-(\d+)-[^-]+(-\d+)?")


class SharedSegment:
    """A piece of shared memory that this process may write; ``memory`` is a uint8 tensor.

    ``name`` leads to it from its creation until ``remove_segment``, and again after ``publish``.
    The memory itself has no name: it is freed with the last process that has it mapped, however
    that process ends, and the size of /dev/shm does not bound it.
    """

    def __init__(self, name: str, size: int, *, create: bool, sparse: bool = False) -> None:
        """``sparse`` memory is taken page by page, when a page is written; other memory is
        page-locked where ranks have GPUs."""
        self.name = name
        if create:
            descriptor = os.memfd_create(name)
            if sparse:
                os.ftruncate(descriptor, size)
            else:
                os.posix_fallocate(descriptor, 0, size)
        else:
            descriptor = os.open(os.path.join(SHARED_MEMORY, name), os.O_RDWR)
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self.memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        # Sparse memory would be taken as a whole. Pages must not stay locked after their mapping,
        # which ends with the segment; a process that ends needs no unlocking.
        weakref.finalize(self, lock_pages(self.memory[: 0 if sparse else size])).atexit = False
        if create:
            self.publish()

    def publish(self) -> None:
        """Let ``name`` lead to the memory; only in the process that created it."""
        # A process that opens the link gets the memory through this process's descriptor.
        target = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        os.symlink(target, os.path.join(SHARED_MEMORY, self.name))


class HostSegments:
    """``count`` segments of a host, which each of its ranks has mapped."""

    def __init__(self, groups: ProcessGroups, count: int, *, sparse: bool = False) -> None:
        self._groups, self._count, self._sparse = groups, count, sparse
        self._segments: tuple[SharedSegment, ...] = ()
        self._names: list[list[str]] = []
        """Names by every rank, of which those by the first rank of a host are used."""

    def names_on(self, host: int) -> list[str]:
        """The names of a host's segments, once there are any."""
        return self._names[self._groups.hosts.first_rank(host)]

    @contextmanager
    def published_segments(self, size: int) -> Iterator[tuple[SharedSegment, ...]]:
        """The segments, of at least ``size`` bytes each; they have names only within the context.
        Collective."""
        first = self._groups.is_first_of_host
        try:
            if not self._segments or len(self._segments[0].memory) < size:
                self._create(size)
            elif first:
                for segment in self._segments:
                    segment.publish()
            yield self._segments
        finally:
            if first:
                for segment in self._segments:
                    remove_segment(segment.name)

    def _create(self, size: int) -> None:
        groups, first = self._groups, self._groups.is_first_of_host
        if first:
            # Killed runs leave their names behind.
            remove_segments(lambda pid: not Path(f"/proc/{pid}").exists())
        self._names = groups.all_gather(segment_names(self._count))
        names = self.names_on(groups.host_index)
        # The smaller segments go before larger ones are taken.
        self._segments = ()
        for name in names if first else ():
            segment = SharedSegment(name, size, create=True, sparse=self._sparse)
            self._segments += (segment,)
        groups.barrier()
        if not first:
            sparse = self._sparse
            self._segments = tuple(
                SharedSegment(name, size, create=False, sparse=sparse) for name in names
            )
        # The names may be removed only after every rank has opened them.
        groups.barrier()


class SharedMemorySender:
    """``Sender`` through segments that every rank of a host has mapped. Engines get whole tensors;
    with ``parts`` each worker has segments of its own, in which only its part is written.

    A source that is ``kept`` gets segments for each of its buckets: they are filled in its first
    push, and engines read them again in later ones.
    """

    parts = False

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self._segments: dict[int, HostSegments] = {}
        """By number of workers."""
        self._buckets: dict[WeightSource, Buckets] = {}
        self._kept: tuple[WeightSource, HostSegments] | None = None
        self._complete = False
        """Whether all segments of ``_kept`` are filled."""
        self._pids = frozenset(groups.gather_from_host(os.getpid()).values())

    @contextmanager
    def send(
        self,
        source: WeightSource,
        wait_until_read: Callable[[int], None] = lambda bucket: None,
    ) -> Iterator[Iterator[ReadableBucket]]:
        """The segments have names only within the context."""
        if source not in self._buckets:
            self._buckets[source] = self._planned(source)
        buckets = self._buckets[source]
        segments = self._segments_for(source, buckets)
        with segments.published_segments(buckets.max_bucket_bytes) as named:
            memory = self._memory(source, buckets, segments, named)
            if source.kept and self._complete:
                yield (_kept(buckets, memory, number) for number in range(len(buckets.parts)))
                return
            yield self._filled(
                source, push_through_host(buckets, self.groups, memory, wait_until_read)
            )

    def _filled(
        self, source: WeightSource, sent: Iterator[ReadableBucket]
    ) -> Iterator[ReadableBucket]:
        yield from sent
        self._complete = self._complete or source.kept

    def _planned(self, source: WeightSource) -> Buckets:
        if not self.parts:
            return Buckets(source, self.groups)
        layout, of_rank = source.engine_layout, self.groups.hosts.of_rank
        engines = one_engine_of_each_host(layout.placement)
        return Buckets(
            source, self.groups, layout.cut, *receiving_ranks_of_engines(engines, of_rank)
        )

    def _segments_for(self, source: WeightSource, buckets: Buckets) -> HostSegments:
        workers = buckets.plan.cut.tensor
        if not source.kept:
            if workers not in self._segments:
                count, sparse = IN_FLIGHT * workers, workers > 1
                self._segments[workers] = HostSegments(self.groups, count, sparse=sparse)
            return self._segments[workers]
        if self._kept is None or self._kept[0] is not source:
            count = len(buckets.parts) * workers
            self._kept = source, HostSegments(self.groups, count, sparse=True)
            self._complete = False
        return self._kept[1]

    def _memory(
        self,
        source: WeightSource,
        buckets: Buckets,
        segments: HostSegments,
        named: Sequence[SharedSegment],
    ) -> HostBuckets:
        layout, here, workers = (
            source.engine_layout,
            self.groups.host_index,
            buckets.plan.cut.tensor,
        )
        hosts: Sequence[int] = layout.hosts_of(here)
        if self.parts:
            served = layout.placement.engines_served_by(here)
            hosts = served[0].host_of_worker if served else (here,) * workers

        def chunk(number: int, first: int) -> WeightChunk:
            places = buckets.places[number]
            # A kept bucket's segment holds nothing else, any other the largest bucket sooner or
            # later. To lock what workers leave unwritten would take it.
            used = places[-1].end if source.kept else len(named[0].memory)
            place = {
                "segments": [
                    segments.names_on(host)[first + (worker if workers > 1 else 0)]
                    for worker, host in enumerate(hosts)
                ],
                "workers": workers if self.parts else None,
                "offsets": [place.offset for place in places],
                "locked": 0 if workers > 1 else used,
            }
            return weight_chunk(_RECEIVER, (place.spec for place in places), place)

        return HostBuckets(buckets, [segment.memory for segment in named], chunk)

    def close(self) -> None:
        """Remove the names that ranks of this host have left in /dev/shm."""
        remove_segments(self._pids.__contains__)


def _kept(buckets: Buckets, memory: HostBuckets, number: int) -> ReadableBucket:
    unseen, chunk = buckets.scattered, memory.chunk(number)
    tensors = () if unseen else memory.tensors(number)
    return ReadableBucket(chunk=chunk, tensors=tensors, unseen=unseen, kept=True)


def segment_names(count: int) -> list[str]:
    """New names for segments of this process, by which ``remove_segments`` recognises them."""
    base = f"{own_segment_prefix()}{uuid.uuid4().hex[:12]}"
    return [f"{base}-{number}" for number in range(count)]


def remove_segment(name: str) -> None:
    """Remove the name; the memory is freed when the last process unmaps it."""
    path = os.path.join(SHARED_MEMORY, name)
    # When a run fails, several processes clean up.
    with suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)  # an engine's adapters
        else:
            os.unlink(path)


def remove_segments(made_by: Callable[[int], bool]) -> None:
    """Remove the names made by processes for whose id ``made_by`` is true: a killed process leaves
    its names behind.

    Names made in other containers stay: they may share /dev/shm and count process ids of their own.
    """
    here = pid_namespace()
    for name in os.listdir(SHARED_MEMORY):
        ours = _OURS.fullmatch(name)
        if ours and int(ours[2]) == here and made_by(int(ours[1])):
            remove_segment(name)
