"""Shards in memory of the trainer's processes: how a worker on the same device maps its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ctrl_megatron.rollout.device_memory import memory_driver
from ctrl_megatron.rollout.packed import PackedPart, unpack_tensors
from ctrl_megatron.rollout.transports.shared_memory import worker_index_and_count
from ctrl_megatron.rollout.weight_chunks import WeightChunk, specs_of


class CudaIpcReceiver:
    """Reads chunks whose place is ``{"driver": name, "handles": [for each engine of the host [for
    each bucket in flight [a handle in hex for each worker]]], "slot": number of this bucket among
    them, "sizes": [bytes for each worker], "parts": [for each worker [``PackedPart``]]}``.

    Memory stays mapped from one push to the next, as long as chunks have its handle: the sender
    frees what they no longer have.
    """

    def __init__(self, number: Callable[[], tuple[int, int]] = worker_index_and_count) -> None:
        self._number, self._driver = number, None
        self._mapped: dict[str, torch.Tensor] = {}

    def tensors(self, chunk: WeightChunk) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors of which the worker's part has values. ValueError if the chunk is cut for
        an engine of another size."""
        place, (worker, size) = chunk["place"], self._number()
        if size != len(place["sizes"]):
            raise ValueError(
                f"the chunk is cut for an engine of {len(place['sizes'])} workers; this one has "
                f"{size}"
            )
        if self._driver is None:
            self._driver = memory_driver(place["driver"])
        handles = [own[worker] for own in place["handles"][chunk["reader"]]]
        for gone in self._mapped.keys() - handles:
            self._driver.close(self._mapped.pop(gone))
        handle = handles[place["slot"]]
        if handle not in self._mapped:
            opened = self._driver.open_handle(bytes.fromhex(handle), place["sizes"][worker])
            self._mapped[handle] = opened
        memory = self._mapped[handle]
        parts = ((memory, PackedPart(*part)) for part in place["parts"][worker])
        yield from unpack_tensors(specs_of(chunk), parts)
