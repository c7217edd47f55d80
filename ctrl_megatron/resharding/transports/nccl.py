"""From shard to shard between different devices: ranks send messages to the workers of engines.

The ranks of each pipeline stage and all workers are one group. ``NcclReceiver`` describes the
chunks: in each push the workers first say which NCCL they have and whether they are still in the
groups, which are made anew if not. Processes on a CPU use gloo behind the same interface, and no
GPU has run this.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, TypeVar

import torch

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.offload import aligned_size
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.parallel.hosts import LOOPBACK
from ctrl_megatron.resharding.buckets import Buckets, fill_message, message_bytes, run_push
from ctrl_megatron.resharding.plan import Transfer, workers_as_receivers
from ctrl_megatron.resharding.schedule import IN_FLIGHT
from ctrl_megatron.resharding.sources import WeightSource
from ctrl_megatron.resharding.transports import ReadableBucket
from ctrl_megatron.resharding.transports.shared_memory import SharedMemorySender
from ctrl_megatron.rollout.communicator import (
    Communicator,
    Library,
    PendingMessages,
    connect_or_serve_store,
    join_communicator,
    library_version,
)
from ctrl_megatron.rollout.packed import PackedPart
from ctrl_megatron.rollout.weight_chunks import weight_chunk

K = TypeVar("K")
_RECEIVER = "ctrl_megatron.rollout.transports.nccl:NcclReceiver"
_GONE_SECONDS = 10.0
"""Seconds in which messages to engines that have read them must have gone."""


class NcclSender:
    """``Sender`` of a model of the trainer as messages; an HF directory goes as whole tensors
    through shared memory."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self._whole = SharedMemorySender(groups)
        self._prepared: tuple[WeightSource, _Messages] | None = None
        self._store: Any = None
        self._session, self._pushes = "", 0

    @contextmanager
    def send(
        self,
        source: WeightSource,
        wait_until_read: Callable[[int], None] = lambda bucket: None,
    ) -> Iterator[Iterator[ReadableBucket]]:
        """Groups and memory of messages are kept from one push to the next, unless a push fails."""
        if source.model is None:
            with self._whole.send(source, wait_until_read) as sent:
                yield sent
            return
        if self._prepared is None or self._prepared[0] is not source:
            self._leave()
            self._prepared = source, _Messages(source, self.groups)
        messages = self._prepared[1]
        try:
            yield self._sent(messages, wait_until_read)
        except BaseException:
            self._leave()
            raise
        if not messages.all_gone():
            # The engines have everything; only the next push needs the groups.
            self._leave()

    def _sent(
        self, messages: _Messages, wait_until_read: Callable[[int], None]
    ) -> Iterator[ReadableBucket]:
        groups, ask = self.groups, f"push {self._pushes}"
        self._pushes += 1
        address = self._open_store()
        place = {"ask": ask, "library": self._library, "store": address}
        yield messages.without_tensors(place)
        # A worker answers while its engine reads this chunk. Only ranks with an engine wait for
        # that, so all ranks meet before the answers are read.
        wait_until_read(0)
        groups.barrier()
        answers = groups.broadcast_from_first(
            self._answers(ask, messages) if groups.is_first else None
        )
        if answers is None:
            return  # An engine is lost, which the push tells.
        self._refuse_others({name: told["version"] for name, told in answers.items()})
        known = {told["session"] for told in answers.values()} == {self._session}
        # Chunks without tensors count as well: bucket 0 is chunk number ``first``.
        first = 1
        if any(groups.any_rank(not known or messages.link is None)):
            self._leave()
            self._session, first = groups.broadcast_from_first(uuid.uuid4().hex), 2
            yield messages.without_tensors(
                {
                    "session": self._session,
                    "senders": [len(ranks) for ranks in messages.ranks_of_stage],
                    "engine_count": messages.engines,
                }
            )
            if any(groups.any_rank(not self._join(messages))):
                self._leave()
                return  # The engines do not meet the trainer either.
        count = len(messages.buckets.parts)
        yield from run_push(count, messages, groups, lambda bucket: wait_until_read(bucket + first))

    @property
    def _library(self) -> Library:
        return "nccl" if self.groups.device.type == "cuda" else "gloo"

    def _open_store(self) -> tuple[str, int]:
        """The address of the store in which ranks and workers meet. Collective."""
        groups, (host, *_) = self.groups, (*self.groups.hosts.addresses, LOOPBACK)
        if self._store is None and groups.is_first:
            self._store = connect_or_serve_store(host)
        port = groups.broadcast_from_first(getattr(self._store, "port", 0))
        if self._store is None:
            self._store = connect_or_serve_store(host, port)
        return host, port

    def _answers(self, ask: str, messages: _Messages) -> dict[str, dict[str, str]] | None:
        """The answer of each worker; None if one has not answered."""
        workers = range(messages.workers)
        keys = {f"{e}.{w}": f"{ask}/{e}.{w}" for e in range(messages.engines) for w in workers}
        if not self._store.check(list(keys.values())):
            return None
        found = {name: json.loads(self._store.get(key)) for name, key in keys.items()}
        for key in keys.values():
            # Every push has names of its own, and the store would grow by them.
            self._store.delete_key(key)
        return found

    def _refuse_others(self, versions: dict[str, str]) -> None:
        own = library_version(self._library)
        if wrong := [name for name, version in versions.items() if version != own]:
            engine, worker = wrong[0].split(".")
            raise UserError(
                f"actor_rollout_ref.rollout.weight_transport=nccl: worker {worker} of engine "
                f"{engine} has {versions[wrong[0]]}, the trainer has {own}",
                remedy="install the same version in the environment of "
                "actor_rollout_ref.rollout.python, or choose another transport",
            )

    def _join(self, messages: _Messages) -> bool:
        """Whether this rank has joined the group of its stage."""
        stage = self.groups.place.pp
        ranks = messages.ranks_of_stage[stage]
        number = ranks.index(self.groups.rank)
        size = len(ranks) + messages.engines * messages.workers
        group = f"{self._session}/{stage}"
        try:
            messages.link = join_communicator(self._library, self._store, group, number, size)
        except RuntimeError as error:
            _tell(f"rank {self.groups.rank} did not meet the engines: {error}")
        return messages.link is not None

    def _leave(self) -> None:
        """Leave the groups; workers that wait for messages fail."""
        if self._session:
            # A store that is gone says the same.
            with suppress(RuntimeError):
                self._store.set(f"{self._session}/over", "")
        self._session = ""
        if self._prepared is not None:
            self._prepared[1].leave()

    def close(self) -> None:
        """Remove the names that ranks of this host have left in /dev/shm."""
        self._whole.close()


class _Messages:
    """``PushPhases`` in which a rank sends a message to every worker for which it has bytes.

    A member that is lost ends the messages of this rank; its engine reports the loss.
    """

    def __init__(self, source: WeightSource, groups: ProcessGroups) -> None:
        takers = workers_as_receivers(source.engine_layout.placement, groups.hosts.of_rank)
        self.buckets = buckets = Buckets(
            source, groups, source.engine_layout.cut, *takers, host_memory=False
        )
        self._groups, plan, layout = groups, buckets.plan, groups.layout
        self.engines, self.workers = len(plan.takers), plan.cut.tensor
        self.ranks_of_stage = [
            layout.ranks_at("dense", (("pp", stage),)) for stage in range(layout.pipeline)
        ]
        self.link: Communicator | None = None
        self._out = [_grouped(own, lambda t: (t.engines[0], t.worker)) for own in buckets.own]
        size = max(sum(map(message_bytes, out.values())) for out in self._out)
        self._memory = [
            torch.empty(size, dtype=torch.uint8, device=groups.device) for _ in range(IN_FLIGHT)
        ]
        self._filled: dict[int, list[tuple[torch.Tensor, int]]] = {}
        self._running: dict[int, PendingMessages] = {}
        here = groups.host_index if groups.is_first_of_host else None
        self._here = [
            engine
            for engine, takers in enumerate(plan.takers)
            if plan.host_of_rank[takers[0]] == here
        ]
        of_workers = [
            buckets.transfers(taker) for engine in self._here for taker in plan.takers[engine]
        ]
        self._into = [
            _grouped(
                chain.from_iterable(own[number] for own in of_workers),
                lambda t: (t.engines[0], t.worker, t.part.pp, t.giver),
            )
            for number in range(len(buckets.parts))
        ]

    def fill(self, number: int) -> None:
        """Write the messages of a bucket, once those before in the same memory have gone."""
        self._gone(number - IN_FLIGHT)
        memory, offset, messages = self._memory[number % IN_FLIGHT], 0, []
        senders = len(self.ranks_of_stage[self._groups.place.pp])
        for (engine, worker), transfers in self._out[number].items():
            message = memory[offset : offset + message_bytes(transfers)]
            fill_message(self.buckets, transfers, message)
            # In the group of a stage its ranks come first, then the workers of all engines.
            messages.append((message, senders + engine * self.workers + worker))
            offset += len(message)
        self._filled[number] = messages

    def begin_exchange(self, number: int) -> None:
        messages = self._filled.pop(number)
        if self.link is not None and messages:
            with self._leaving_if_lost():
                self._running[number] = self.link.send(messages)

    def finish_exchange(self, number: int) -> None:
        """Workers receive a bucket when it is offered to them."""

    def readable_bucket(self, number: int) -> ReadableBucket:
        """The bucket, whose bytes are in no memory of this host."""
        last = number + 1 == len(self._into)
        place = self._place() | {
            "bucket": number,
            "messages": self._list_messages(number),
            "next": [] if last else self._list_messages(number + 1),
            "parts": self._list_parts(number),
        }
        specs = (place.spec for place in self.buckets.places[number])
        return ReadableBucket(chunk=weight_chunk(_RECEIVER, specs, place), unseen=True)

    def without_tensors(self, place: dict[str, Any]) -> ReadableBucket:
        return ReadableBucket(chunk=weight_chunk(_RECEIVER, (), self._place() | place), unseen=True)

    def all_gone(self) -> bool:
        """Whether everything that was sent has gone and the group is whole."""
        for number in list(self._running):
            self._gone(number)
        return self.link is not None

    def leave(self) -> None:
        """Leave the group, whatever is on its way."""
        self._running.clear()
        self._filled.clear()
        if self.link is not None:
            self.link.close()
        self.link = None

    def _gone(self, number: int) -> None:
        running = self._running.pop(number, None)
        with self._leaving_if_lost():
            if running is not None and not running.wait_until_ended(_GONE_SECONDS):
                raise RuntimeError(f"the messages of bucket {number} were never taken")

    @contextmanager
    def _leaving_if_lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            _tell(f"rank {self._groups.rank} has lost an engine: {error}")
            self.leave()

    def _place(self) -> dict[str, Any]:
        return {"engines": self._here, "workers": self.workers}

    def _list_messages(self, number: int) -> list[list[list[tuple[int, int, int]]]]:
        """For each engine of this host and each of its workers (stage, sender, bytes)."""
        messages = [[[] for _ in range(self.workers)] for _ in self._here]
        for (engine, worker, stage, giver), transfers in self._into[number].items():
            sender = self.ranks_of_stage[stage].index(giver)
            own = messages[self._here.index(engine)][worker]
            own.append((stage, sender, message_bytes(transfers)))
        return messages

    def _list_parts(self, number: int) -> list[list[list[tuple[int, PackedPart]]]]:
        """For each engine of this host and each of its workers (message, part in it)."""
        index = {place.spec.name: i for i, place in enumerate(self.buckets.places[number])}
        by_engine = [[[] for _ in range(self.workers)] for _ in self._here]
        counts: dict[tuple[int, int], int] = defaultdict(int)
        for (engine, worker, _, _), transfers in self._into[number].items():
            offset, message = 0, counts[engine, worker]
            counts[engine, worker] += 1
            for transfer in transfers:
                for rectangle in transfer.rectangles:
                    piece = rectangle.piece
                    part = PackedPart(index[piece.hf], piece.hf_start, piece.extent, offset)
                    by_engine[self._here.index(engine)][worker].append((message, part))
                    offset += aligned_size(rectangle.num_bytes)
        return by_engine


def _grouped(
    transfers: Iterable[Transfer], key: Callable[[Transfer], K]
) -> dict[K, list[Transfer]]:
    found: dict[K, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        found[key(transfer)].append(transfer)
    return found


def _tell(what: str) -> None:
    print(f"weights over NCCL: {what}", file=sys.stderr, flush=True)
