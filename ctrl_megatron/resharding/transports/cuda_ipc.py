"""From shard to shard on the same devices: the trainer's ranks write into device memory that the
workers of colocated engines map.

The rank on a worker's device has three buckets for it. All ranks of the host map them and write
their parts; messages between hosts go over gloo through host memory. Handles are CUDA's own bytes.
Processes on a CPU use host memory behind the same interface, and no GPU has run this.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from ctrl_megatron.models.offload import aligned
from ctrl_megatron.models.shards import Piece
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.resharding.schedule import IN_FLIGHT
from ctrl_megatron.resharding.shard_buckets import ShardBuckets
from ctrl_megatron.resharding.sources import ModelSource
from ctrl_megatron.resharding.transports.shards import Lend, ShardsSender
from ctrl_megatron.rollout.device_memory import DriverName, memory_driver
from ctrl_megatron.rollout.packed import PackedPart
from ctrl_megatron.rollout.weight_chunks import WeightChunk, tensor_at, weight_chunk
from ctrl_megatron.types import TensorSpec

_RECEIVER = "ctrl_megatron.rollout.transports.cuda_ipc:CudaIpcReceiver"


class CudaIpcSender(ShardsSender):
    """``ShardsSender`` into memory that engines map; it has no names and ends with its process."""

    def _prepare(self, source: ModelSource) -> tuple[ShardBuckets, Lend]:
        buckets = ShardBuckets(source, self.groups, source.layout.placement)
        memory = _MappedBuckets(buckets, self.groups)
        return buckets, lambda: nullcontext(memory)


class _MappedBuckets:
    """``BucketMemory`` in which the parts of a worker lie behind each other."""

    def __init__(self, buckets: ShardBuckets, groups: ProcessGroups) -> None:
        takers, of_rank = buckets.plan.takers, groups.hosts.of_rank
        self._served = [e for e, own in enumerate(takers) if of_rank[own[0]] == groups.here]
        self.engine = self._served[0] if self._served else 0
        self._places, workers = buckets.places, range(buckets.plan.cut.tensor)
        self._parts: list[list[list[PackedPart]]] = []
        self._find: list[dict[tuple[int, str], list[tuple[Piece, TensorSpec, int]]]] = []
        self._sizes = [0] * len(workers)
        for number, places in enumerate(buckets.places):
            self._pack(number, buckets, {p.spec.name: i for i, p in enumerate(places)})
        self._name: DriverName = "cuda" if groups.device.type == "cuda" else "host"
        self._driver = driver = memory_driver(self._name)
        mine = {
            (slot, engine, worker): driver.allocate(self._sizes[worker])
            for slot in range(IN_FLIGHT)
            for engine in range(len(takers))
            for worker in workers
            if takers[engine][worker] == groups.rank
        }
        given = groups.from_all({key: driver.get_handle(memory) for key, memory in mine.items()})
        self._handles = {key: handle for own in given for key, handle in own.items()}
        self._memory = {
            key: mine[key] if key in mine else driver.open_handle(handle, self._sizes[key[2]])
            for rank, own in enumerate(given)
            if of_rank[rank] == groups.here
            for key, handle in own.items()
        }

    def _pack(self, number: int, buckets: ShardBuckets, index: dict[str, int]) -> None:
        """Choose the place of every part of a bucket."""
        used = [0] * len(self._sizes)
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
                used[worker] += aligned(rectangle.num_bytes)
        self._sizes = [max(pair) for pair in zip(self._sizes, used, strict=True)]
        self._parts.append(packed)
        self._find.append(find)

    def at(self, number: int, engine: int, worker: int, name: str, piece: Piece) -> torch.Tensor:
        """``piece`` is some rows of one of the worker's parts."""
        memory = self._memory[number % IN_FLIGHT, engine, worker]
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

    def synchronize(self) -> None:
        self._driver.synchronize()

    def chunk(self, number: int) -> WeightChunk:
        slot, workers = number % IN_FLIGHT, range(len(self._sizes))
        place = {
            "driver": self._name,
            "handles": [
                [self._handles[slot, engine, worker].hex() for worker in workers]
                for engine in self._served
            ],
            "sizes": self._sizes,
            "parts": self._parts[number],
        }
        return weight_chunk(_RECEIVER, (place.spec for place in self._places[number]), place)
