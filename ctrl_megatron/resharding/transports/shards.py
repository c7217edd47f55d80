"""From shard to shard: every worker of an engine gets its own bytes, from ranks that have them.

Each host has segments of shared memory for each worker number, in the place of the workers' own
memory; its engines share them, since they are cut alike. A rank writes into the segments of its
own host and sends messages to ranks of others, over gloo. Buckets follow ``resharding.schedule``:
while one is filled, the one before is exchanged and the one before that is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ctrl_megatron.models.layer_spec import fuses_norms
from ctrl_megatron.models.rules import hf_shapes
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.resharding.plan import ALIGNMENT, EngineLayout, TensorPlace, place_in_buckets
from ctrl_megatron.resharding.schedule import IN_FLIGHT
from ctrl_megatron.resharding.shard_plan import EngineCut, Rectangle, ShardPlan
from ctrl_megatron.resharding.sources import MegatronSource, WeightSource
from ctrl_megatron.resharding.transports import SentBucket
from ctrl_megatron.resharding.transports.shared_memory import (
    HostSegments,
    SharedMemorySender,
    SharedSegment,
)
from ctrl_megatron.rollout.weight_chunks import spec_bytes, tensor_at, weight_chunk
from ctrl_megatron.types import TensorSpec

_RECEIVER = "ctrl_megatron.rollout.transports.shards:ShardsReceiver"


class ShardsSender:
    """``Sender`` of a model of the trainer from shard to shard; an HF directory goes as whole
    tensors, since it has no shards."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self._whole = SharedMemorySender(groups)
        self._prepared: tuple[MegatronSource, _Push, HostSegments] | None = None

    @contextmanager
    def send(
        self,
        source: WeightSource,
        wait_until_read: Callable[[int], None] = lambda bucket: None,
    ) -> Iterator[Iterator[SentBucket]]:
        """The segments have names only within the context."""
        if not isinstance(source, MegatronSource):
            with self._whole.send(source, wait_until_read) as buckets:
                yield buckets
            return
        if self._prepared is None or self._prepared[0] is not source:
            count = IN_FLIGHT * source.layout.workers
            segments = HostSegments(self.groups, count, sparse=source.layout.workers > 1)
            self._prepared = source, _Push(source, self.groups), segments
        _, push, segments = self._prepared
        with segments.named(push.size) as named:
            yield push.buckets(named, wait_until_read)

    def close(self) -> None:
        """Remove the names that ranks of this host have left in /dev/shm."""
        self._whole.close()


@dataclass(frozen=True, slots=True)
class _Item:
    """A rectangle of virtual stage ``chunk`` that goes to a worker."""

    worker: int
    chunk: int
    rectangle: Rectangle


def _size(items: Iterable[_Item]) -> int:
    """Bytes of a message with ``items``."""
    return sum(_aligned(item.rectangle.num_bytes) for item in items)


def _parts(items: Iterable[_Item], memory: torch.Tensor) -> Iterator[tuple[_Item, torch.Tensor]]:
    """(item, its part of the message in ``memory``)."""
    offset = 0
    for item in items:
        piece = item.rectangle.piece
        spec = TensorSpec(name=piece.hf, dtype=item.rectangle.dtype, shape=piece.extent)
        yield item, tensor_at(memory, spec, offset)
        offset += _aligned(item.rectangle.num_bytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class _Bucket:
    """One bucket, as this rank sees it. The items of a message have the order of the plan, so that
    sender and receiver agree on it."""

    places: tuple[TensorPlace, ...]
    own: list[_Item] = field(default_factory=list)
    """What it writes into its host's segments."""
    out: dict[int, list[_Item]] = field(default_factory=dict)
    """Rank of another host -> the message for it."""
    into: dict[int, list[_Item]] = field(default_factory=dict)
    """Rank of another host -> the message from it."""


Pending = list[tuple[Any, Sequence[_Item], torch.Tensor]]
"""(work, what arrives with it, the message's memory)."""


class _Push:
    """The work of one rank in every push of a model."""

    def __init__(self, source: MegatronSource, groups: ProcessGroups) -> None:
        self._source, self._groups = source, groups
        layout, shape, of_rank = source.layout, source.model.shape.base, groups.hosts.of_rank
        self._workers = layout.workers
        self._plan = plan = ShardPlan(
            shape,
            groups.layout,
            EngineCut(tensor=layout.workers),
            _takers(layout, of_rank),
            of_rank,
            dtype=layout.dtype,
            te_names=fuses_norms(source.model.shape),
        )
        shapes, dtypes = hf_shapes(shape), {p.spec.name: p.spec.dtype for p in source.places}
        self._parts = plan.buckets(layout.bucket_bytes)
        self._buckets: list[_Bucket] = []
        number_of = {}
        self._place: dict[str, TensorPlace] = {}
        for number, parts in enumerate(self._parts):
            number_of |= dict.fromkeys(parts, number)
            names = dict.fromkeys(r.piece.hf for part in parts for _, r in plan.rectangles(part))
            specs = [TensorSpec(name=n, dtype=dtypes[n], shape=shapes[n]) for n in names]
            places = place_in_buckets(specs, sys.maxsize)
            self._place |= {place.spec.name: place for place in places}
            self._buckets.append(_Bucket(places))
        for transfer in plan.transfers(groups.rank):
            bucket, chunk = self._buckets[number_of[transfer.part]], transfer.part.chunk
            items = [_Item(transfer.worker, chunk, r) for r in transfer.rectangles]
            here = of_rank[transfer.taker] == of_rank[transfer.giver]
            if transfer.giver != groups.rank and not here:
                bucket.into.setdefault(transfer.giver, []).extend(items)
            elif transfer.giver == groups.rank and not here:
                bucket.out.setdefault(transfer.taker, []).extend(items)
            elif transfer.giver == groups.rank:
                bucket.own += items
        ends = (place.offset + spec_bytes(place.spec) for place in self._place.values())
        self.size = max(ends)
        """Bytes of a segment."""

    def buckets(
        self, segments: Sequence[SharedSegment], wait_until_read: Callable[[int], None]
    ) -> Iterator[SentBucket]:
        """Yield each bucket once it is complete on all hosts. Collective."""
        pending: Pending = []
        for number in range(len(self._buckets) + 2):
            if IN_FLIGHT <= number < len(self._buckets):
                wait_until_read(number - IN_FLIGHT)
            # All ranks have completed the bucket before the last, and all engines have read the
            # one whose memory is filled now.
            self._groups.barrier()
            if number >= 2:
                yield self._sent(number - 2, segments)
            started = self._start(number, segments) if number < len(self._buckets) else []
            self._finish(pending, number - 1, segments)
            pending = started

    def _memory(self, number: int, worker: int, segments: Sequence[SharedSegment]) -> torch.Tensor:
        return segments[number % IN_FLIGHT * self._workers + worker].memory

    def _at(self, number: int, item: _Item, segments: Sequence[SharedSegment]) -> torch.Tensor:
        """The item's place in the memory of its worker."""
        piece = item.rectangle.piece
        place, memory = self._place[piece.hf], self._memory(number, item.worker, segments)
        return tensor_at(memory, place.spec, place.offset)[piece.hf_slices]

    def _start(self, number: int, segments: Sequence[SharedSegment]) -> Pending:
        """Write and send this rank's share of a bucket, and begin to receive."""
        bucket, started, group = self._buckets[number], Pending(), self._groups.host
        for giver, items in bucket.into.items():
            memory = torch.empty(_size(items), dtype=torch.uint8)
            work = dist.irecv(memory, giver, group=group, tag=number)
            started.append((work, items, memory))
        for taker, items in bucket.out.items():
            memory = torch.empty(_size(items), dtype=torch.uint8)
            for item, part in _parts(items, memory):
                part.copy_(self._weight(item))
            work = dist.isend(memory, taker, group=group, tag=number)
            started.append((work, (), memory))
        for item in bucket.own:
            self._at(number, item, segments).copy_(self._weight(item))
        return started

    def _weight(self, item: _Item) -> torch.Tensor:
        weight = self._source.weight(item.chunk, item.rectangle.param)
        return weight.detach()[item.rectangle.piece.slices]

    def _finish(self, pending: Pending, number: int, segments: Sequence[SharedSegment]) -> None:
        """Wait for the messages of a bucket and write what has arrived."""
        for work, items, memory in pending:
            work.wait()
            for item, part in _parts(items, memory):
                self._at(number, item, segments).copy_(part)

    def _sent(self, number: int, segments: Sequence[SharedSegment]) -> SentBucket:
        places, first = self._buckets[number].places, number % IN_FLIGHT * self._workers
        place = {
            "segments": [s.name for s in segments[first : first + self._workers]],
            "offsets": [place.offset for place in places],
        }
        chunk = weight_chunk(_RECEIVER, (place.spec for place in places), place)
        return SentBucket(chunk=chunk, tensors=self._wholes(number, segments))

    def _wholes(
        self, number: int, segments: Sequence[SharedSegment]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor) of a bucket, put together from the parts of all workers."""
        if self._workers == 1:
            memory = self._memory(number, 0, segments)
            for place in self._buckets[number].places:
                yield place.spec.name, tensor_at(memory, place.spec, place.offset)
            return
        for part in self._parts[number]:
            wholes: dict[str, torch.Tensor] = {}
            for worker, rectangle in self._plan.rectangles(part):
                piece = rectangle.piece
                if piece.hf not in wholes:
                    spec = self._place[piece.hf].spec
                    wholes[piece.hf] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
                item = _Item(worker, part.chunk, rectangle)
                wholes[piece.hf][piece.hf_slices] = self._at(number, item, segments)
            yield from wholes.items()


def _takers(layout: EngineLayout, of_rank: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks that receive for the workers of each host with engines: its ranks in turn."""
    found = []
    for host in layout.hosts:
        ranks = [rank for rank, own in enumerate(of_rank) if own == host]
        found.append(tuple(ranks[worker % len(ranks)] for worker in range(layout.workers)))
    return tuple(found)
