"""Shards in memory of the trainer's processes: how a worker on the same device maps its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch

from ctrl_megatron.rollout.device_memory import MemoryDriver, memory_driver
from ctrl_megatron.rollout.packed import PackedPart, unpacked
from ctrl_megatron.rollout.transports.shared_memory import worker_number
from ctrl_megatron.rollout.weight_chunks import WeightChunk, specs_of

_KEPT = 6
"""Mapped buckets: a sender uses three in turn, and new ones after a restart."""


class CudaIpcReceiver:
    """Reads chunks whose place is ``{"driver": name, "handles": [for each engine of the host [a
    handle in hex for each worker]], "sizes": [bytes for each worker], "parts": [for each worker
    [``PackedPart``]]}``.

    Memory stays mapped from one push to the next.
    """

    def __init__(self, number: Callable[[], tuple[int, int]] = worker_number) -> None:
        self._number, self._driver = number, None
        self._mapped: OrderedDict[str, torch.Tensor] = OrderedDict()

    def tensors(self, chunk: WeightChunk) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors of which the worker's part has values. ValueError if the chunk is cut for
        an engine of another size."""
        place, (worker, size) = chunk["place"], self._number()
        handles = place["handles"][chunk["reader"]]
        if size != len(handles):
            raise ValueError(
                f"the chunk is cut for an engine of {len(handles)} workers; this one has {size}"
            )
        if self._driver is None:
            self._driver = memory_driver(place["driver"])
        memory = self._memory(self._driver, handles[worker], place["sizes"][worker])
        parts = ((memory, PackedPart(*part)) for part in place["parts"][worker])
        yield from unpacked(specs_of(chunk), parts)

    def _memory(self, driver: MemoryDriver, handle: str, size: int) -> torch.Tensor:
        if handle not in self._mapped:
            self._mapped[handle] = driver.open_handle(bytes.fromhex(handle), size)
        self._mapped.move_to_end(handle)
        while len(self._mapped) > _KEPT:
            driver.close(self._mapped.popitem(last=False)[1])
        return self._mapped[handle]
