"""Shards as messages between devices: how a worker of an engine gets its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ctrl_megatron.models.offload import aligned_size
from ctrl_megatron.rollout.communicator import (
    Communicator,
    PendingMessages,
    connect_or_serve_store,
    join_communicator,
    library_version,
)
from ctrl_megatron.rollout.packed import PackedPart, unpack_tensors
from ctrl_megatron.rollout.transports.shared_memory import worker_index_and_count
from ctrl_megatron.rollout.weight_chunks import WeightChunk, specs_of

_POLL_SECONDS = 1.0
SLOTS = 2
"""Buckets in memory: one is loaded while the next arrives."""


class NcclReceiver:
    """Reads three kinds of chunks. Their places have ``"engines"``, the numbers of the engines of
    this host, and ``"workers"``, the number of workers for which they are cut.

    ``{"ask": key, "library": name, "store": [host, port]}``: the worker connects to the trainer's
    store and writes its version of the library and its session under ``key/engine.worker``.

    ``{"session": name, "senders": [for each pipeline stage the number of its ranks]}``: the worker
    joins one group per stage. Its number there follows those of the ranks, engine by engine.

    ``{"bucket": number, "messages": [for each engine of the host [for each worker [[stage, sender,
    bytes]]]], "next": the messages of the next bucket, "parts": [for each engine of the host [for
    each worker [[number of the message, PackedPart]]]]}``: messages of the next bucket arrive while
    this one is loaded.
    """

    def __init__(self, number: Callable[[], tuple[int, int]] = worker_index_and_count) -> None:
        self._number = number
        self._address: tuple[str, int] | None = None
        self._store: Any = None
        self._library: Any = None
        self._session = ""
        self._links: list[Communicator] = []
        self._memory: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * SLOTS
        self._arriving: dict[int, tuple[list[torch.Tensor], list[PendingMessages]]] = {}

    def tensors(self, chunk: WeightChunk) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors of which the worker's part has values. ValueError if the chunk is cut for
        an engine of another size, or if the trainer has gone."""
        place, (worker, size) = chunk["place"], self._number()
        if size != place["workers"]:
            raise ValueError(
                f"the chunk is cut for an engine of {place['workers']} workers; this one has {size}"
            )
        engine = place["engines"][chunk["reader"]]
        if "ask" in place:
            self._answer(place, f"{engine}.{worker}")
        elif "session" in place:
            self._join(place, engine * size + worker)
        else:
            memory = self._arrived(place, chunk["reader"], worker)
            parts = place["parts"][chunk["reader"]][worker]
            yield from unpack_tensors(
                specs_of(chunk), ((memory[number], PackedPart(*part)) for number, part in parts)
            )

    def _answer(self, place: dict[str, Any], name: str) -> None:
        host, port = place["store"]
        if self._address != (host, port):
            self._store, self._address = connect_or_serve_store(host, port), (host, port)
        # A push that failed has left its own, and each push counts its buckets from 0.
        self._arriving.clear()
        self._library = place["library"]
        told = {"version": library_version(self._library), "session": self._session}
        self._store.set(f"{place['ask']}/{name}", json.dumps(told))

    def _join(self, place: dict[str, Any], number: int) -> None:
        for link in self._links:
            link.close()
        self._session, self._links = place["session"], []
        workers = place["engine_count"] * place["workers"]
        for stage, senders in enumerate(place["senders"]):
            group, own = f"{self._session}/{stage}", senders + number
            self._links.append(
                join_communicator(self._library, self._store, group, own, senders + workers)
            )

    def _arrived(self, place: dict[str, Any], reader: int, worker: int) -> list[torch.Tensor]:
        """The memory of each message of a bucket."""
        bucket = place["bucket"]
        # The messages of the next bucket arrive while this one is loaded.
        for number, messages in ((bucket, place["messages"]), (bucket + 1, place["next"])):
            if messages and number not in self._arriving:
                self._arriving[number] = self._receive(number, messages[reader][worker])
        memory, running = self._arriving.pop(bucket)
        for link in running:
            while not link.wait_until_ended(_POLL_SECONDS):
                if self._store.check([f"{self._session}/over"]):
                    raise ValueError("the trainer has ended the push")
        return memory

    def _receive(
        self, bucket: int, messages: list[tuple[int, int, int]]
    ) -> tuple[list[torch.Tensor], list[PendingMessages]]:
        slot, offset = bucket % SLOTS, 0
        needed = sum(aligned_size(size) for _, _, size in messages)
        if len(self._memory[slot]) < needed:
            device = "cuda" if self._library == "nccl" else "cpu"
            self._memory[slot] = torch.empty(needed, dtype=torch.uint8, device=device)
        tensors: list[torch.Tensor] = []
        by_stage: dict[int, list[tuple[torch.Tensor, int]]] = {}
        for stage, sender, size in messages:
            tensors.append(self._memory[slot][offset : offset + size])
            by_stage.setdefault(stage, []).append((tensors[-1], sender))
            offset += aligned_size(size)
        return tensors, [self._links[stage].receive(own) for stage, own in by_stage.items()]
