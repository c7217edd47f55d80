"""The buckets of a push from shard to shard as one rank sees them, and how ranks execute
``resharding.schedule`` with them."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ctrl_megatron.models.layer_spec import fuses_norms
from ctrl_megatron.models.offload import aligned
from ctrl_megatron.models.rules import hf_shapes
from ctrl_megatron.models.shape import ModelShape
from ctrl_megatron.models.shards import Piece
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.parallel.placement import Placement
from ctrl_megatron.resharding.plan import TensorPlace, place_in_buckets
from ctrl_megatron.resharding.schedule import steps
from ctrl_megatron.resharding.shard_plan import (
    ShardPlan,
    Transfer,
    takers_of_engines,
    workers_as_takers,
)
from ctrl_megatron.resharding.sources import ModelSource
from ctrl_megatron.resharding.transports import SentBucket
from ctrl_megatron.rollout.weight_chunks import WeightChunk, tensor_at
from ctrl_megatron.types import TensorSpec

Read = Callable[[int, str, Piece], torch.Tensor]
"""(worker, HF name, rectangle of it) -> the rectangle's bytes in that worker's memory."""


class ShardBuckets:
    """What one rank sends and receives in every push of a model.

    ``placement`` are the engines that receive bytes of their own: through ranks beside their
    workers, or ``directly``.
    """

    def __init__(
        self,
        source: ModelSource,
        groups: ProcessGroups,
        placement: Placement,
        *,
        directly: bool = False,
    ) -> None:
        layout, shape, of_rank = source.layout, source.model.shape.base, groups.hosts.of_rank
        takers, hosts = workers_as_takers(placement, of_rank)
        if not directly:
            takers, hosts = takers_of_engines(placement, of_rank), of_rank
        assert isinstance(shape, ModelShape)  # the configuration refuses others with these media
        self._source = source
        self.plan = plan = ShardPlan(
            shape,
            groups.layout,
            layout.cut,
            takers,
            hosts,
            dtype=layout.dtype,
            te_names=fuses_norms(source.model.shape),
        )
        shapes, dtypes = hf_shapes(shape), {p.spec.name: p.spec.dtype for p in source.places}
        self.parts = plan.buckets(layout.bucket_bytes)
        """The parameters of every bucket."""
        self.places: list[tuple[TensorPlace, ...]] = []
        """The tensors of every bucket; their offsets are those of whole tensors."""
        self._number_of = {}
        for number, parts in enumerate(self.parts):
            self._number_of |= dict.fromkeys(parts, number)
            names = dict.fromkeys(r.piece.hf for part in parts for _, r in plan.rectangles(part))
            specs = [TensorSpec(name=n, dtype=dtypes[n], shape=shapes[n]) for n in names]
            self.places.append(place_in_buckets(specs, sys.maxsize))
        self.own = self.transfers(groups.rank)
        """What this rank sends and receives of every bucket."""

    def transfers(self, rank: int | None) -> list[list[Transfer]]:
        """Bucket by bucket what ``rank`` sends and receives; what all ranks do if it is None.

        The transfers between a giver and a taker have the same order on all ranks.
        """
        found: list[list[Transfer]] = [[] for _ in self.parts]
        for transfer in self.plan.transfers(rank):
            found[self._number_of[transfer.part]].append(transfer)
        return found

    def weights(self, transfer: Transfer) -> Iterator[torch.Tensor]:
        """The values of a transfer's rectangles, of which this rank has the shard."""
        for rectangle in transfer.rectangles:
            weight = self._source.weight(transfer.part.chunk, rectangle.param)
            yield weight.detach()[rectangle.piece.slices]

    def wholes(self, number: int, read: Read) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor) of a bucket, put together from the parts of all workers."""
        specs = {place.spec.name: place.spec for place in self.places[number]}
        for part in self.parts[number]:
            wholes: dict[str, torch.Tensor] = {}
            for worker, rectangle in self.plan.rectangles(part):
                piece = rectangle.piece
                found = read(worker, piece.hf, piece)
                if found.shape == specs[piece.hf].shape:
                    wholes[piece.hf] = found
                    continue
                if piece.hf not in wholes:
                    spec = specs[piece.hf]
                    wholes[piece.hf] = found.new_empty(spec.shape)
                wholes[piece.hf][piece.hf_slices] = found
            yield from wholes.items()


class Phases(Protocol):
    """The phases of a push on one rank, for the number of a bucket."""

    def fill(self, number: int) -> None:
        """Write what this rank sends into messages."""
        ...

    def exchange(self, number: int) -> None:
        """Begin to send and to receive."""
        ...

    def settle(self, number: int) -> None:
        """Return when the bucket may be offered to engines, as far as this rank is concerned."""
        ...

    def sent(self, number: int) -> SentBucket:
        """The bucket for this host's engines."""
        ...


def run_push(
    buckets: int,
    phases: Phases,
    groups: ProcessGroups,
    wait_until_read: Callable[[int], None],
) -> Iterator[SentBucket]:
    """Execute ``schedule.steps``; yields each bucket when engines may load it. Collective."""
    for step in steps(buckets):
        match step:
            case "meet", _, _:
                groups.barrier()
            case "begin", "fill", number:
                phases.fill(number)
            case "begin", "exchange", number:
                phases.exchange(number)
            case "end", "exchange", number:
                phases.settle(number)
            case "begin", "load", number:
                yield phases.sent(number)
            case "end", "load", number:
                wait_until_read(number)
            case "end", "fill", _:
                pass


class BucketMemory(Protocol):
    """The memory of a host's engines for the buckets in flight, which all ranks of the host can
    write and read."""

    engine: int
    """The number of an engine of this host in the plan; any where there is none."""

    def at(self, number: int, engine: int, worker: int, name: str, piece: Piece) -> torch.Tensor:
        """The rectangle ``piece`` of HF tensor ``name`` in a worker's memory for a bucket."""
        ...

    def synchronize(self) -> None:
        """Return when everything that this rank has written is there."""
        ...

    def chunk(self, number: int) -> WeightChunk:
        """What this host's engines need to read a bucket."""
        ...


@dataclass(frozen=True, slots=True)
class _Message:
    work: Any
    memory: torch.Tensor
    arrives: Sequence[Transfer]
    """What it brings; nothing for one that this rank sends."""


class HostExchange:
    """``Phases`` with ``BucketMemory``: a rank writes into the memory of its own host, and messages
    to ranks of other hosts go over gloo."""

    def __init__(self, buckets: ShardBuckets, groups: ProcessGroups, memory: BucketMemory) -> None:
        self._buckets, self._groups, self._memory = buckets, groups, memory
        of_rank = groups.hosts.of_rank
        takers = buckets.plan.takers
        self._scattered = any(len({of_rank[taker] for taker in own}) > 1 for own in takers)
        """Whether no host has all parts of an engine on several hosts."""
        self._here: list[list[Transfer]] = []
        self._out: list[dict[int, list[Transfer]]] = []
        self._into: list[dict[int, list[Transfer]]] = []
        for transfers in buckets.own:
            here, out, into = [], defaultdict(list), defaultdict(list)
            for transfer in transfers:
                gives = transfer.giver == groups.rank
                if of_rank[transfer.giver] != of_rank[transfer.taker]:
                    side, peer = (out, transfer.taker) if gives else (into, transfer.giver)
                    side[peer].append(transfer)
                elif gives:
                    here.append(transfer)
            self._here.append(here)
            self._out.append(out)
            self._into.append(into)
        self._filled: dict[int, dict[int, torch.Tensor]] = {}
        self._running: dict[int, list[_Message]] = {}

    def fill(self, number: int) -> None:
        """Write the messages to other hosts."""
        self._filled[number] = {}
        for taker, transfers in self._out[number].items():
            self._filled[number][taker] = memory = torch.empty(
                message_bytes(transfers), dtype=torch.uint8
            )
            fill_message(self._buckets, transfers, memory)

    def exchange(self, number: int) -> None:
        """Begin to send and to receive messages, and write what stays on this host."""
        group, running = self._groups.host, self._running.setdefault(number, [])
        for giver, transfers in self._into[number].items():
            memory = torch.empty(message_bytes(transfers), dtype=torch.uint8)
            work = dist.irecv(memory, group=group, tag=number, group_src=giver)
            running.append(_Message(work, memory, transfers))
        for taker, memory in self._filled.pop(number).items():
            work = dist.isend(memory, group=group, tag=number, group_dst=taker)
            running.append(_Message(work, memory, ()))
        for transfer in self._here[number]:
            values = self._buckets.weights(transfer)
            for rectangle, weight in zip(transfer.rectangles, values, strict=True):
                self._place(number, transfer, rectangle.piece).copy_(weight)

    def settle(self, number: int) -> None:
        """Wait for the messages and write what has arrived."""
        for message in self._running.pop(number):
            message.work.wait()
            for transfer, piece, part in in_message(message.arrives, message.memory):
                self._place(number, transfer, piece).copy_(part)
        self._memory.synchronize()

    def sent(self, number: int) -> SentBucket:
        """The bucket; whole tensors are put together from the parts of one engine's workers, where
        all of them are on this host."""
        if self._scattered:
            return SentBucket(chunk=self._memory.chunk(number), unseen=True)
        read = partial(self._memory.at, number, self._memory.engine)
        tensors = self._buckets.wholes(number, read)
        return SentBucket(chunk=self._memory.chunk(number), tensors=tensors)

    def _place(self, number: int, transfer: Transfer, piece: Piece) -> torch.Tensor:
        return self._memory.at(number, transfer.engine, transfer.worker, piece.hf, piece)


def message_bytes(transfers: Iterable[Transfer]) -> int:
    """The size of a message with these transfers."""
    return sum(aligned(r.num_bytes) for transfer in transfers for r in transfer.rectangles)


def fill_message(
    buckets: ShardBuckets, transfers: Sequence[Transfer], memory: torch.Tensor
) -> None:
    """Write the message with these transfers, of which this rank has the shards."""
    weights = (weight for transfer in transfers for weight in buckets.weights(transfer))
    for (_, _, part), weight in zip(in_message(transfers, memory), weights, strict=True):
        part.copy_(weight)


def in_message(
    transfers: Iterable[Transfer], memory: torch.Tensor
) -> Iterator[tuple[Transfer, Piece, torch.Tensor]]:
    """(transfer, rectangle, the rectangle's values) of everything in a message."""
    offset = 0
    for transfer in transfers:
        for rectangle in transfer.rectangles:
            piece = rectangle.piece
            spec = TensorSpec(name=piece.hf, dtype=rectangle.dtype, shape=piece.extent)
            yield transfer, piece, tensor_at(memory, spec, offset)
            offset += aligned(rectangle.num_bytes)
