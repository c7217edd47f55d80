"""From shard to shard through shared memory: every worker of an engine gets its own bytes, from
ranks that have them.

Each host has segments of shared memory for each worker number, in the place of the workers' own
memory; its engines share them, since they are cut alike. Buckets follow ``resharding.schedule``:
while one is filled, the one before is exchanged and the one before that is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from ctrl_megatron.models.shards import Piece
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.resharding.schedule import IN_FLIGHT
from ctrl_megatron.resharding.shard_buckets import (
    BucketMemory,
    HostExchange,
    ShardBuckets,
    run_push,
)
from ctrl_megatron.resharding.shard_plan import one_engine_of_each_host
from ctrl_megatron.resharding.sources import ModelSource, WeightSource
from ctrl_megatron.resharding.transports import SentBucket
from ctrl_megatron.resharding.transports.shared_memory import (
    HostSegments,
    SharedMemorySender,
    SharedSegment,
)
from ctrl_megatron.rollout.weight_chunks import WeightChunk, spec_bytes, tensor_at, weight_chunk

_RECEIVER = "ctrl_megatron.rollout.transports.shards:ShardsReceiver"
Lend = Callable[[], AbstractContextManager[BucketMemory]]
"""Gives the memory of the buckets for a push."""


class ShardsSender:
    """``Sender`` of a model of the trainer from shard to shard; an HF directory goes as whole
    tensors, since it has no shards."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self._whole = SharedMemorySender(groups)
        self._segments: HostSegments | None = None
        self._prepared: dict[ModelSource, tuple[ShardBuckets, Lend]] = {}

    @contextmanager
    def send(
        self,
        source: WeightSource,
        wait_until_read: Callable[[int], None] = lambda bucket: None,
    ) -> Iterator[Iterator[SentBucket]]:
        """The memory of the buckets is kept from one push to the next; all sources use it in turn,
        since they have the same engines."""
        if not isinstance(source, ModelSource):
            with self._whole.send(source, wait_until_read) as sent:
                yield sent
            return
        if source not in self._prepared:
            self._prepared[source] = self._prepare(source)
        buckets, lend = self._prepared[source]
        with lend() as memory:
            phases = HostExchange(buckets, self.groups, memory)
            yield run_push(len(buckets.parts), phases, self.groups, wait_until_read)

    def _prepare(self, source: ModelSource) -> tuple[ShardBuckets, Lend]:
        """The buckets of a source, and their memory for a push, whose segments have names only
        meanwhile."""
        engines, workers = source.layout.placement, source.layout.cut.tensor
        buckets = ShardBuckets(source, self.groups, one_engine_of_each_host(engines))
        if self._segments is None:
            self._segments = HostSegments(self.groups, IN_FLIGHT * workers, sparse=workers > 1)
        segments = self._segments
        ends = (place.offset + spec_bytes(place.spec) for own in buckets.places for place in own)
        size = max(ends)

        here = self.groups.here
        served = next((e.host_of_worker for e in engines.served_on(here)), (here,) * workers)

        @contextmanager
        def lend() -> Iterator[BucketMemory]:
            with segments.named(size) as named:
                names = [segments.names_on(host) for host in served]
                yield _Segments(buckets, named, names)

        return buckets, lend

    def close(self) -> None:
        """Remove the names that ranks of this host have left in /dev/shm."""
        self._whole.close()


class _Segments:
    """``BucketMemory`` in which a worker's part of a tensor is where it is in the whole tensor."""

    engine = 0
    """All engines of a host read the same memory."""

    def __init__(
        self,
        buckets: ShardBuckets,
        segments: Sequence[SharedSegment],
        names: Sequence[Sequence[str]],
    ) -> None:
        """``names`` are, for each worker of an engine that this host serves, those of the segments
        on the worker's host."""
        self._workers, self._segments = buckets.plan.cut.tensor, segments
        self._names = names
        self._places = buckets.places
        self._place = {place.spec.name: place for own in buckets.places for place in own}

    def at(self, number: int, engine: int, worker: int, name: str, piece: Piece) -> torch.Tensor:
        place, memory = self._place[name], self._of(number)[worker].memory
        return tensor_at(memory, place.spec, place.offset)[piece.hf_slices]

    def synchronize(self) -> None:
        """Copies into host memory have ended when they return."""

    def chunk(self, number: int) -> WeightChunk:
        places, first = self._places[number], self._first(number)
        place = {
            "segments": [own[first + worker] for worker, own in enumerate(self._names)],
            "offsets": [place.offset for place in places],
            # To lock sparse memory would take all of it.
            "locked": 0 if self._workers > 1 else len(self._segments[0].memory),
        }
        return weight_chunk(_RECEIVER, (place.spec for place in places), place)

    def _of(self, number: int) -> Sequence[SharedSegment]:
        """The segments of all workers for a bucket."""
        first = self._first(number)
        return self._segments[first : first + self._workers]

    def _first(self, number: int) -> int:
        """The number of the first worker's segment for a bucket."""
        return number % IN_FLIGHT * self._workers
