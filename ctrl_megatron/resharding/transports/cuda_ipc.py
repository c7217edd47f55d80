"""From shard to shard on the same devices: the trainer's ranks write into device memory that the
workers of colocated engines map.

The rank on a worker's device has three buckets for it. All ranks of the host map them and write
their parts; messages between hosts go over gloo through host memory. Handles are CUDA's own bytes.
Processes on a CPU use host memory behind the same interface, and no GPU has run this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import torch

from ctrl_megatron.models.offload import aligned_size
from ctrl_megatron.models.shards import Piece
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.resharding.buckets import Buckets, push_through_host
from ctrl_megatron.resharding.plan import receiving_ranks_of_engines
from ctrl_megatron.resharding.schedule import IN_FLIGHT
from ctrl_megatron.resharding.sources import WeightSource
from ctrl_megatron.resharding.transports import ReadableBucket
from ctrl_megatron.resharding.transports.shared_memory import SharedMemorySender
from ctrl_megatron.rollout.device_memory import DriverName, MemoryDriver, memory_driver
from ctrl_megatron.rollout.packed import PackedPart
from ctrl_megatron.rollout.weight_chunks import WeightChunk, tensor_at, weight_chunk
from ctrl_megatron.types import TensorSpec

_RECEIVER = "ctrl_megatron.rollout.transports.cuda_ipc:CudaIpcReceiver"
_Place = tuple[int, int, int]
"""The number of a bucket among those in flight, of an engine, and of its worker."""


class CudaIpcSender:
    """``Sender`` of a model of the trainer into memory that engines map; it has no names and ends
    with its process. An HF directory goes as whole tensors through shared memory."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self._whole, self._mapped = SharedMemorySender(groups), _MappedMemory(groups)
        self._prepared: dict[WeightSource, tuple[Buckets, _MappedBuckets]] = {}

    @contextmanager
    def send(
        self,
        source: WeightSource,
        wait_until_read: Callable[[int], None] = lambda bucket: None,
    ) -> Iterator[Iterator[ReadableBucket]]:
        """All sources use the memory in turn, since they have the same engines."""
        if source.model is None:
            with self._whole.send(source, wait_until_read) as sent:
                yield sent
            return
        if source not in self._prepared:
            cut, engines = source.engine_layout.cut, source.engine_layout.placement
            takers = receiving_ranks_of_engines(engines, self.groups.hosts.of_rank)
            buckets = Buckets(source, self.groups, cut, *takers, host_memory=False)
            self._prepared[source] = buckets, _MappedBuckets(buckets, self.groups, self._mapped)
        buckets, memory = self._prepared[source]
        self._mapped.grow_to(memory.sizes, buckets.plan.takers)
        yield push_through_host(buckets, self.groups, memory, wait_until_read)
        self._mapped.free_replaced()

    def close(self) -> None:
        """Remove the names that ranks of this host have left in /dev/shm."""
        self._whole.close()


class _MappedMemory:
    """Memory for the buckets in flight of each worker, on the device of the rank that receives for
    it; every rank of the host has it mapped."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self.sizes: list[int] = []
        """Bytes by worker."""
        self.of: dict[_Place, torch.Tensor] = {}
        """(slot, engine, worker) -> the memory, as it is mapped in this process."""
        self.handles: dict[_Place, bytes] = {}
        self._own: dict[_Place, torch.Tensor] = {}
        self._replaced: list[torch.Tensor] = []

    @property
    def name(self) -> DriverName:
        return "cuda" if self._groups.device.type == "cuda" else "host"

    @cached_property
    def driver(self) -> MemoryDriver:
        return memory_driver(self.name)

    def grow_to(self, sizes: Sequence[int], takers: Sequence[Sequence[int]]) -> None:
        """Have at least so many bytes for each worker, in new memory if that before is smaller.
        Collective; ``takers`` as of ``ShardPlan``, the same in every call."""
        # The sizes are the plan's, so all ranks return here or none.
        if self.sizes and all(map(int.__ge__, self.sizes, sizes)):
            return
        groups, driver = self._groups, self.driver
        for place, memory in self.of.items():
            if place not in self._own:
                driver.close(memory)
        # Workers still have it mapped (``free_replaced``).
        self._replaced += self._own.values()
        self.sizes = list(map(max, sizes, self.sizes or sizes))
        self._own = {
            (slot, engine, worker): driver.allocate(size)
            for slot in range(IN_FLIGHT)
            for engine, own in enumerate(takers)
            for worker, (taker, size) in enumerate(zip(own, self.sizes, strict=True))
            if taker == groups.rank
        }
        handles_by_rank = groups.all_gather(
            {at: driver.get_handle(own) for at, own in self._own.items()}
        )
        self.handles = {place: handle for own in handles_by_rank for place, handle in own.items()}
        self.of = {
            place: self._own[place]
            if place in self._own
            else driver.open_handle(handle, self.sizes[place[2]])
            for rank, own in enumerate(handles_by_rank)
            if groups.hosts.of_rank[rank] == groups.host_index
            for place, handle in own.items()
        }

    def free_replaced(self) -> None:
        """Free what was replaced, after a push: since its first bucket no worker has it mapped."""
        while self._replaced:
            self.driver.free(self._replaced.pop())


class _MappedBuckets:
    """``BucketMemory`` in which the parts of a worker lie behind each other."""

    def __init__(self, buckets: Buckets, groups: ProcessGroups, mapped: _MappedMemory) -> None:
        takers, of_rank = buckets.plan.takers, groups.hosts.of_rank
        self._served = [e for e, own in enumerate(takers) if of_rank[own[0]] == groups.host_index]
        self._buckets, self._mapped = buckets, mapped
        self._parts: list[list[list[PackedPart]]] = []
        self._find: list[dict[tuple[int, str], list[tuple[Piece, TensorSpec, int]]]] = []
        self.sizes = [0] * buckets.plan.cut.tensor
        """Bytes that a worker needs for the largest of its buckets."""
        for number, places in enumerate(buckets.places):
            self._pack(number, buckets, {p.spec.name: i for i, p in enumerate(places)})

    def _pack(self, number: int, buckets: Buckets, index: dict[str, int]) -> None:
        """Choose the place of every part of a bucket."""
        used = [0] * len(self.sizes)
        packed: list[list[PackedPart]] = [[] for _ in used]
        find: dict[tuple[int, str], list[tuple[Piece, TensorSpec, int]]] = {}
        for part in buckets.parts[number]:
            for worker, rectangle in buckets.plan.rectangles(part):
                piece, offset = rectangle.piece, used[worker]
                spec = TensorSpec(name=piece.hf, dtype=rectangle.dtype, shape=piece.extent)
                packed[worker].append(
                    PackedPart(index[piece.hf], piece.hf_start, piece.extent, offset)
                )
                find.setdefault((worker, piece.hf), []).append((piece, spec, offset))
                used[worker] += aligned_size(rectangle.num_bytes)
        self.sizes = [max(pair) for pair in zip(self.sizes, used, strict=True)]
        self._parts.append(packed)
        self._find.append(find)

    def piece_view(
        self, number: int, engine: int, worker: int, name: str, piece: Piece
    ) -> torch.Tensor:
        """``piece`` is some rows of one of the worker's parts."""
        memory = self._mapped.of[number % IN_FLIGHT, engine, worker]
        for whole, spec, offset in self._find[number][worker, name]:
            first = piece.hf_start[0] - whole.hf_start[0]
            rows = slice(first, first + piece.extent[0])
            if (
                first >= 0
                and rows.stop <= whole.extent[0]
                and piece.hf_start[1:] == whole.hf_start[1:]
            ):
                return tensor_at(memory, spec, offset)[rows]
        raise AssertionError(f"{name}: {piece} is no part of worker {worker}")

    def tensors(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        for engine in self._served[:1]:
            yield from self._buckets.whole_tensors(number, partial(self.piece_view, number, engine))

    def synchronize(self) -> None:
        self._mapped.driver.synchronize()

    def chunk(self, number: int) -> WeightChunk:
        mapped, workers = self._mapped, range(len(self.sizes))
        place = {
            "driver": mapped.name,
            "handles": [
                [
                    [mapped.handles[slot, engine, worker].hex() for worker in workers]
                    for slot in range(IN_FLIGHT)
                ]
                for engine in self._served
            ],
            "slot": number % IN_FLIGHT,
            "sizes": mapped.sizes,
            "parts": self._parts[number],
        }
        return weight_chunk(_RECEIVER, (p.spec for p in self._buckets.places[number]), place)
