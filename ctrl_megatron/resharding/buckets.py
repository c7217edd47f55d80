"""Buckets of weights on every host: made, filled by its ranks, exchanged between hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.resharding.plan import Route, TensorPlace
from ctrl_megatron.resharding.sources import WeightSource
from ctrl_megatron.rollout.weight_chunks import (
    SharedSegment,
    WeightChunk,
    remove_segment,
    remove_segments,
    segment_names,
    spec_bytes,
    tensor_at,
    weight_chunk,
)

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBucket:
    """A bucket that lies whole in this host's shared memory, if anybody reads it here."""

    number: int
    segment: SharedSegment
    places: tuple[TensorPlace, ...]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, view of the segment) of every tensor."""
        for place in self.places:
            yield place.spec.name, tensor_at(self.segment.memory, place.spec, place.offset)

    def chunk(self) -> WeightChunk:
        """What an engine of this host is told."""
        return weight_chunk(self.segment.name, ((p.spec, p.offset) for p in self.places))


class BucketMemory:
    """Two segments on every host, which each of its ranks has mapped.

    They are made at the first use and used again: memory that the system gives anew takes several
    times as long to fill. All ranks call the same methods in the same order.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self._segments: tuple[SharedSegment, ...] = ()

    @contextmanager
    def segments(self, places: Sequence[TensorPlace]) -> Iterator[tuple[SharedSegment, ...]]:
        """Segments that hold the largest bucket. Others find them by name within the body; the
        names vanish at its end, also on an error."""
        first = self.groups.is_first_here
        size = max(p.offset + spec_bytes(p.spec) for p in places)
        try:
            if self._segments and len(self._segments[0].memory) >= size:
                if first:
                    for segment in self._segments:
                        segment.publish()
            else:
                self._make(size)
            yield self._segments
        finally:
            if first:
                for segment in self._segments:
                    remove_segment(segment.name)

    def _make(self, size: int) -> None:
        groups = self.groups
        if groups.is_first_here:
            remove_segments(lambda pid: not Path(f"/proc/{pid}").exists())
        names = groups.from_first_here(segment_names(2))
        self._segments = ()
        if groups.is_first_here:
            for name in names:
                self._segments += (SharedSegment(name, size, create=True),)
        groups.barrier()
        if not groups.is_first_here:
            self._segments = tuple(SharedSegment(name, size, create=False) for name in names)
        # The names may vanish from here on.
        groups.barrier()


def fill_buckets(
    source: WeightSource,
    segments: Sequence[SharedSegment],
    groups: ProcessGroups,
    wait_until_free: Callable[[int], None] = lambda bucket: None,
) -> Iterator[FilledBucket]:
    """Yield each bucket once it is whole on every host that reads it; they use the segments in
    turn. Collective.

    ``wait_until_free(bucket)`` blocks until the reader beside this rank has let go of ``bucket``;
    it is called before that bucket's segment is filled again.
    """
    for bucket in range(1 + max(place.bucket for place in source.places)):
        if bucket >= len(segments):
            wait_until_free(bucket - len(segments))
        groups.barrier()
        segment = segments[bucket % len(segments)]
        source.fill(bucket, segment.memory)
        groups.barrier()
        places = tuple(place for place in source.places if place.bucket == bucket)
        if any(place.routes for place in places):
            if groups.is_first_here:
                _exchange(places, segment.memory, groups)
            groups.barrier()
        yield FilledBucket(number=bucket, segment=segment, places=places)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteSpan:
    """Bytes of a bucket that travel together."""

    route: Route
    start: int
    stop: int


def byte_spans(places: Iterable[TensorPlace]) -> tuple[ByteSpan, ...]:
    """What has to be sent of one bucket, neighbours that go the same way together. Pure."""
    spans: list[ByteSpan] = []
    growing: dict[Route, int] = {}
    for place in places:
        stop = place.offset + spec_bytes(place.spec)
        grown: dict[Route, int] = {}
        for route in place.routes:
            index = growing.get(route, len(spans))
            if index == len(spans):
                spans.append(ByteSpan(route=route, start=place.offset, stop=stop))
            spans[index] = ByteSpan(route=route, start=spans[index].start, stop=stop)
            grown[route] = index
        growing = grown
    return tuple(spans)


def pieces(spans: Iterable[ByteSpan]) -> list[ByteSpan]:
    """The spans cut small, so that a host passes on what it has while more arrives; the beginnings
    of all come first. Pure."""
    cut = [
        (begin, ByteSpan(route=span.route, start=start, stop=min(start + _PIECE_BYTES, span.stop)))
        for span in spans
        for begin, start in enumerate(range(span.start, span.stop, _PIECE_BYTES))
    ]
    return [piece for _, piece in sorted(cut, key=lambda entry: entry[0])]


def _exchange(places: Iterable[TensorPlace], memory: torch.Tensor, groups: ProcessGroups) -> None:
    """Bring one bucket, uint8 ``memory``, to the hosts that lack parts of it.

    Called by the first rank of every host; over gloo, from host memory to host memory.
    """
    running, arriving = [], []
    for tag, piece in enumerate(pieces(byte_spans(places))):
        if groups.here not in piece.route:
            continue
        part, position = memory[piece.start : piece.stop], piece.route.index(groups.here)
        before, after = piece.route[:position], piece.route[position + 1 :]
        to = [groups.hosts.first_rank(host) for host in after[:1]]
        if before:
            giver = groups.hosts.first_rank(before[-1])
            arriving.append((dist.irecv(part, giver, group=groups.host, tag=tag), part, to, tag))
        else:
            running += [dist.isend(part, rank, group=groups.host, tag=tag) for rank in to]
    for work, part, to, tag in arriving:
        assert work is not None
        work.wait()
        running += [dist.isend(part, rank, group=groups.host, tag=tag) for rank in to]
    for work in running:
        assert work is not None
        work.wait()
