"""Shards in POSIX shared memory: how a worker of an engine reads its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ctrl_megatron.rollout.transports.shared_memory import SharedMemoryReceiver
from ctrl_megatron.rollout.weight_chunks import WeightChunk


class ShardsReceiver:
    """Reads chunks whose place is that of ``SharedMemoryReceiver``, but with ``"segments"``, one
    for each worker, instead of ``"segment"``.

    The tensors have their whole shapes, but of each only the part that this worker's loaders take
    has a value; the rest is memory that was never written.
    """

    def __init__(self, number: Callable[[], tuple[int, int]] | None = None) -> None:
        """``number`` is ``worker_number`` by default."""
        self._number, self._memory = number or worker_number, SharedMemoryReceiver()

    def tensors(self, chunk: WeightChunk) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the worker's segment. ValueError if the chunk is cut for an engine of
        another size."""
        (worker, size), segments = self._number(), chunk["place"]["segments"]
        if size != len(segments):
            raise ValueError(
                f"the chunk is cut for an engine of {len(segments)} workers; this one has {size}"
            )
        place = {**chunk["place"], "segment": segments[worker]}
        return self._memory.tensors({**chunk, "place": place})


def worker_number() -> tuple[int, int]:
    """(number of this process among the workers of its engine, their number)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
