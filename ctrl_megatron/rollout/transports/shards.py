"""Shards in POSIX shared memory: how a worker of an engine reads its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ctrl_megatron.rollout.transports.shared_memory import SharedMemoryReceiver, worker_number
from ctrl_megatron.rollout.weight_chunks import WeightChunk


class ShardsReceiver:
    """Reads chunks whose place is that of ``SharedMemoryReceiver``, but with a segment for each
    worker, on the worker's host.

    The tensors have their whole shapes, but of each only the part that this worker's loaders take
    has a value; the rest is memory that was never written.
    """

    def __init__(self, number: Callable[[], tuple[int, int]] | None = None) -> None:
        """``number`` is ``worker_number`` by default."""
        self._number, self._memory = number or worker_number, SharedMemoryReceiver(number)

    def tensors(self, chunk: WeightChunk) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the worker's segment. ValueError if the chunk is cut for an engine of
        another size."""
        (worker, size), segments = self._number(), chunk["place"]["segments"]
        if size != len(segments):
            raise ValueError(
                f"the chunk is cut for an engine of {len(segments)} workers; this one has {size}"
            )
        place = {**chunk["place"], "segments": [segments[worker]]}
        return self._memory.tensors({**chunk, "place": place})
