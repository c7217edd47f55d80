"""The buckets of a push as one rank sees them, and how ranks execute ``resharding.schedule`` with
them."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, pairwise
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ctrl_megatron.models.fp8 import (
    FP8,
    SCALES,
    block_maxima,
    block_scales,
    quantise,
    update_block_maxima,
)
from ctrl_megatron.models.offload import aligned_size
from ctrl_megatron.models.shards import Piece
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.resharding.plan import (
    WHOLE,
    EngineCut,
    PushPart,
    PushPlan,
    TensorPlace,
    Transfer,
    one_worker_on_each_host,
    place_in_buckets,
    receiving_ranks_of_engines,
)
from ctrl_megatron.resharding.schedule import push_steps
from ctrl_megatron.resharding.sources import WeightSource
from ctrl_megatron.resharding.transports import ReadableBucket
from ctrl_megatron.rollout.weight_chunks import WeightChunk, tensor_at
from ctrl_megatron.types import TensorSpec

Read = Callable[[int, str, Piece], torch.Tensor]
"""(worker, HF name, rectangle of it) -> the rectangle's bytes in that worker's memory."""
Line = tuple[int, ...]
"""Ranks through which bytes pass: the first has them, each sends them to the next."""
_PIECE_BYTES = 8 << 20
"""Bytes that a rank passes on while the next ones arrive."""


class Buckets:
    """The buckets of the pushes of a source, as one rank sends and receives them.

    By default every host with an engine gets whole tensors in its memory. ``cut``, ``takers`` and
    ``host_of_rank`` are otherwise those of ``PushPlan``, and so is ``host_memory``.
    """

    def __init__(
        self,
        source: WeightSource,
        groups: ProcessGroups,
        cut: EngineCut = WHOLE,
        takers: tuple[tuple[int, ...], ...] = (),
        host_of_rank: tuple[int, ...] = (),
        *,
        host_memory: bool = True,
    ) -> None:
        layout = source.engine_layout
        if not takers:
            hosts = one_worker_on_each_host(layout.placement)
            takers, host_of_rank = receiving_ranks_of_engines(hosts, groups.hosts.of_rank)
        self._source, self._groups = source, groups
        self.plan = plan = PushPlan(
            source.shape,
            source.trainer_layout,
            cut,
            takers,
            host_of_rank,
            dtype=layout.dtype,
            te_names=source.te_names,
            sends=layout.sends,
            quantised=layout.quantised,
            host_memory=host_memory,
        )
        self.places: list[list[TensorPlace]] = []
        """The tensors of every bucket; their offsets are those of whole tensors."""
        self._number_of: dict[PushPart, int] = {}
        if host_memory:
            placed = place_in_buckets(source.specs, layout.bucket_bytes)
            self.places = [list(own) for _, own in groupby(placed, lambda place: place.bucket)]
            bucket_of = {place.spec.name: place.bucket for place in placed}
            self._number_of = {part: bucket_of[plan.tensor(part)] for part in plan.parts}
        else:
            specs = {spec.name: spec for spec in source.specs}
            for number, parts in enumerate(plan.buckets(layout.bucket_bytes)):
                self._number_of |= dict.fromkeys(parts, number)
                names = dict.fromkeys(r.piece.hf for p in parts for _, r in plan.rectangles(p))
                self.places.append(list(place_in_buckets((specs[n] for n in names), sys.maxsize)))
        self.parts: list[list[PushPart]] = [[] for _ in self.places]
        """The parameters, or single tensors, of every bucket."""
        for part, number in self._number_of.items():
            self.parts[number].append(part)
        self.own = self.transfers(groups.rank)
        """The transfers of every bucket in which this rank takes part."""

    @cached_property
    def tensor_places(self) -> dict[str, TensorPlace]:
        """HF name -> the tensor's place, over all buckets."""
        return {place.spec.name: place for own in self.places for place in own}

    @cached_property
    def routes(self) -> tuple[list[list[Transfer]], list[dict[Line, list[Transfer]]]]:
        """Bucket by bucket the transfers that this rank copies within its host, and the messages
        between hosts in which it takes part."""
        rank, of_rank = self._groups.rank, self._groups.hosts.of_rank
        copied: list[list[Transfer]] = []
        messages: list[dict[Line, list[Transfer]]] = []
        for transfers in self.own:
            here, lines = [], defaultdict(list)
            for transfer in transfers:
                if of_rank[transfer.giver] != of_rank[transfer.takers[0]]:
                    lines[transfer.giver, *transfer.takers].append(transfer)
                elif transfer.giver == rank:
                    here.append(transfer)
            copied.append(here)
            messages.append(lines)
        return copied, messages

    @cached_property
    def scattered(self) -> bool:
        """Whether an engine's workers take their parts on several hosts, so that the memory of none
        has whole tensors."""
        of_rank = self._groups.hosts.of_rank
        return any(len({of_rank[taker] for taker in own}) > 1 for own in self.plan.takers)

    @property
    def max_bucket_bytes(self) -> int:
        """Bytes of memory in which every bucket has room as whole tensors."""
        return max(places[-1].end for places in self.places)

    def transfers(self, rank: int | None) -> list[list[Transfer]]:
        """Bucket by bucket the transfers in which ``rank`` takes part; all of them if it is None.

        The transfers from one rank to another have the same order on both.
        """
        found: list[list[Transfer]] = [[] for _ in self.parts]
        for transfer in self.plan.transfers(rank):
            found[self._number_of[transfer.part]].append(transfer)
        return found

    def weights(
        self, transfer: Transfer, scales: dict[str, torch.Tensor] | None = None
    ) -> Iterator[torch.Tensor]:
        """The values of a transfer's rectangles in their order, as ``WeightSource.values`` or in 8
        bits; this rank has the shard. ``scales`` are those of the bucket's weights in 8 bits
        (``Buckets.scales``)."""
        for rectangle in transfer.rectangles:
            values, piece = self._source.values(transfer.part.chunk, rectangle), rectangle.piece
            if scales and rectangle.dtype == FP8:
                own = scales[piece.hf + SCALES].to(values.device)
                values = quantise(values, own, piece.hf_start)
            yield values

    def scales(self, number: int) -> dict[str, torch.Tensor]:
        """Name -> float32 scales of a bucket's weights in 8 bits, on the host; {} if it has none.
        Collective over all ranks if there are any: a block may lie in the shards of several."""
        specs = [p.spec for p in self.places[number] if p.spec.name.endswith(SCALES)]
        if not specs:
            return {}
        sizes = [prod(spec.shape) for spec in specs]
        largest = torch.zeros(sum(sizes))
        parts = largest.split(sizes)
        of = {s.name: part.view(s.shape) for s, part in zip(specs, parts, strict=True)}
        for transfer in self.own[number]:
            if transfer.giver != self._groups.rank:
                continue
            for rectangle, values in zip(transfer.rectangles, self.weights(transfer), strict=True):
                if rectangle.dtype == FP8:
                    start = rectangle.piece.hf_start
                    block = block_maxima(values, start).cpu()
                    update_block_maxima(of[rectangle.piece.hf + SCALES], block, start)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._groups.host)
        return {name: block_scales(blocks) for name, blocks in of.items()}

    def whole_tensors(self, number: int, read: Read) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor) of a bucket, put together from the parts of all workers."""
        specs = {place.spec.name: place.spec for place in self.places[number]}
        for part in self.parts[number]:
            wholes: dict[str, torch.Tensor] = {}
            for worker, rectangle in self.plan.rectangles(part):
                piece = rectangle.piece
                values = read(worker, piece.hf, piece)
                if values.shape == specs[piece.hf].shape:
                    wholes[piece.hf] = values
                    continue
                if piece.hf not in wholes:
                    wholes[piece.hf] = values.new_empty(specs[piece.hf].shape)
                wholes[piece.hf][piece.hf_slices] = values
            yield from wholes.items()


class PushPhases(Protocol):
    """The phases of a push on one rank, for the number of a bucket."""

    def fill(self, number: int) -> None:
        """Write what this rank sends of bucket ``number`` into memory."""
        ...

    def begin_exchange(self, number: int) -> None:
        """Begin to send and to receive bucket ``number``; returns before it has arrived."""
        ...

    def finish_exchange(self, number: int) -> None:
        """Return when the bucket may be offered to engines, as far as this rank is concerned."""
        ...

    def readable_bucket(self, number: int) -> ReadableBucket:
        """The bucket for this host's engines."""
        ...


def run_push(
    buckets: int,
    phases: PushPhases,
    groups: ProcessGroups,
    wait_until_read: Callable[[int], None],
) -> Iterator[ReadableBucket]:
    """Execute ``schedule.push_steps``; yields each bucket when engines may load it. Collective.

    ``wait_until_read(number)`` returns when the engines beside this rank have read a bucket.
    """
    for step in push_steps(buckets):
        match step:
            case "meet", _, _:
                groups.barrier()
            case "begin", "fill", number:
                phases.fill(number)
            case "begin", "exchange", number:
                phases.begin_exchange(number)
            case "end", "exchange", number:
                phases.finish_exchange(number)
            case "begin", "load", number:
                yield phases.readable_bucket(number)
            case "end", "load", number:
                wait_until_read(number)
            # ``fill`` returns when it has ended.
            case "end", "fill", _:
                pass


class BucketMemory(Protocol):
    """The memory of a host's engines for the buckets in flight, which all ranks of the host can
    write and read."""

    def piece_view(
        self, number: int, engine: int, worker: int, name: str, piece: Piece
    ) -> torch.Tensor:
        """The rectangle ``piece`` of HF tensor ``name`` in a worker's memory for a bucket."""
        ...

    def tensors(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole tensor) of a bucket, as an engine of this host has it."""
        ...

    def synchronize(self) -> None:
        """Return when everything that this rank has written is there."""
        ...

    def chunk(self, number: int) -> WeightChunk:
        """The message from which this host's engines read a bucket."""
        ...


class HostBuckets:
    """``BucketMemory`` in which every tensor has room as a whole, at its ``TensorPlace``; in memory
    of a worker's own only the worker's part of it is written. All engines of a host read the same
    memory."""

    def __init__(
        self,
        buckets: Buckets,
        memory: Sequence[torch.Tensor],
        chunk: Callable[[int, int], WeightChunk],
    ) -> None:
        """``memory`` are uint8 tensors of ``Buckets.size`` that the ranks of a host share: for each
        bucket in flight, or each bucket, one for every worker number. ``chunk`` makes the chunk of
        a bucket from its number and the index of its first memory."""
        self._buckets, self._memory, self._chunk = buckets, memory, chunk
        self._workers = buckets.plan.cut.tensor

    def piece_view(
        self, number: int, engine: int, worker: int, name: str, piece: Piece
    ) -> torch.Tensor:
        return self._whole(number, worker, self._buckets.tensor_places[name])[piece.hf_slices]

    def tensors(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        if self._workers > 1:
            yield from self._buckets.whole_tensors(number, partial(self.piece_view, number, 0))
            return
        for place in self._buckets.places[number]:
            yield place.spec.name, self._whole(number, 0, place)

    def synchronize(self) -> None:
        """Copies into host memory have ended when they return."""

    def chunk(self, number: int) -> WeightChunk:
        return self._chunk(number, self._first(number))

    def _first(self, number: int) -> int:
        return number * self._workers % len(self._memory)

    def _whole(self, number: int, worker: int, place: TensorPlace) -> torch.Tensor:
        return tensor_at(self._memory[self._first(number) + worker], place.spec, place.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """A piece of a message on its way to this rank."""

    work: Any
    piece: torch.Tensor
    passed_on: tuple[int, int] | None
    """The next rank of the line, and the tag of the message to it."""


class HostExchange:
    """``PushPhases`` with ``BucketMemory``: a rank writes into the memory of its own host, and
    messages to ranks of other hosts go over gloo, in pieces that each rank of a line passes on.
    """

    def __init__(self, buckets: Buckets, groups: ProcessGroups, memory: BucketMemory) -> None:
        self._buckets, self._groups, self._memory = buckets, groups, memory
        self._here, self._lines = buckets.routes
        self._messages: dict[int, dict[Line, torch.Tensor]] = {}
        self._arriving: dict[int, list[_Arrival]] = {}
        self._leaving: dict[int, list[Any]] = {}
        self._tags = Counter[tuple[int, int]]()

    def fill(self, number: int) -> None:
        """Write what stays on this host, and the messages to others."""
        scales = self._buckets.scales(number)
        self._messages[number] = messages = {}
        for line, transfers in self._lines[number].items():
            messages[line] = torch.empty(message_bytes(transfers), dtype=torch.uint8)
            if line[0] == self._groups.rank:
                fill_message(self._buckets, transfers, messages[line], scales)
        for transfer in self._here[number]:
            values = self._buckets.weights(transfer, scales)
            for rectangle, weight in zip(transfer.rectangles, values, strict=True):
                self._place(number, transfer, rectangle.piece).copy_(weight)
        # Every rank has all scales; one of each host writes them.
        for name, values in scales.items() if self._groups.is_first_of_host else ():
            whole = Piece(hf=name, hf_start=(0, 0), start=(0, 0), extent=tuple(values.shape))
            self._memory.piece_view(number, 0, 0, name, whole).copy_(values)

    def begin_exchange(self, number: int) -> None:
        groups, rank = self._groups, self._groups.rank
        arriving: list[tuple[int, _Arrival]] = []
        leaving = self._leaving[number] = []
        for line, memory in self._messages[number].items():
            hops = {hop: self._tags[hop] for hop in pairwise(line) if rank in hop}
            into = next((hop for hop in hops if hop[1] == rank), None)
            out = next((hop for hop in hops if hop[0] == rank), None)
            for turn, start in enumerate(range(0, len(memory), _PIECE_BYTES)):
                piece = memory[start : start + _PIECE_BYTES]
                to = None if out is None else (out[1], hops[out] + turn)
                if into is None:
                    assert to is not None
                    work = dist.isend(piece, group=groups.host, group_dst=to[0], tag=to[1])
                    leaving.append(work)
                else:
                    tag = hops[into] + turn
                    work = dist.irecv(piece, group=groups.host, group_src=into[0], tag=tag)
                    arriving.append((turn, _Arrival(work=work, piece=piece, passed_on=to)))
            for hop in hops:
                # Both ends of a hop count the same pieces: equal tags meet without being exchanged.
                self._tags[hop] += -(-len(memory) // _PIECE_BYTES)
        # The first pieces of all lines come first, so that no line waits for another one.
        self._arriving[number] = [arrival for _, arrival in sorted(arriving, key=lambda a: a[0])]

    def finish_exchange(self, number: int) -> None:
        """Pass on to the next host and write what arrives, and wait until everything that this rank
        sends has left."""
        leaving = self._leaving.pop(number)
        for arrival in self._arriving.pop(number):
            arrival.work.wait()
            if arrival.passed_on is not None:
                to, tag = arrival.passed_on
                group = self._groups.host
                leaving.append(dist.isend(arrival.piece, group=group, group_dst=to, tag=tag))
        for line, message in self._messages.pop(number).items():
            if line[0] != self._groups.rank:
                for transfer, piece, part in message_rectangles(self._lines[number][line], message):
                    self._place(number, transfer, piece).copy_(part)
        self._memory.synchronize()
        for work in leaving:
            work.wait()

    def readable_bucket(self, number: int) -> ReadableBucket:
        """The bucket; its tensors are those of one engine of this host, where all of its workers
        are here."""
        chunk = self._memory.chunk(number)
        if self._buckets.scattered:
            return ReadableBucket(chunk=chunk, unseen=True)
        return ReadableBucket(chunk=chunk, tensors=self._memory.tensors(number))

    def _place(self, number: int, transfer: Transfer, piece: Piece) -> torch.Tensor:
        """The place of a rectangle in the memory of the worker for which this host takes it."""
        of_rank, here = self._groups.hosts.of_rank, self._groups.host_index
        pairs = zip(transfer.takers, transfer.engines, strict=True)
        engine = next(engine for taker, engine in pairs if of_rank[taker] == here)
        return self._memory.piece_view(number, engine, transfer.worker, piece.hf, piece)


def message_bytes(transfers: Iterable[Transfer]) -> int:
    """Bytes of the message with these transfers."""
    return sum(aligned_size(r.num_bytes) for transfer in transfers for r in transfer.rectangles)


def fill_message(
    buckets: Buckets,
    transfers: Sequence[Transfer],
    memory: torch.Tensor,
    scales: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write the message with these transfers, of which this rank has the shards, into ``memory``
    (uint8); ``scales`` as for ``Buckets.weights``."""
    weights = (weight for transfer in transfers for weight in buckets.weights(transfer, scales))
    for (_, _, part), weight in zip(message_rectangles(transfers, memory), weights, strict=True):
        part.copy_(weight)


def message_rectangles(
    transfers: Iterable[Transfer], memory: torch.Tensor
) -> Iterator[tuple[Transfer, Piece, torch.Tensor]]:
    """(transfer, rectangle, the rectangle's values) of everything in a message, whose bytes are
    ``memory`` (uint8)."""
    offset = 0
    for transfer in transfers:
        for rectangle in transfer.rectangles:
            piece = rectangle.piece
            spec = TensorSpec(name=piece.hf, dtype=rectangle.dtype, shape=piece.extent)
            yield transfer, piece, tensor_at(memory, spec, offset)
            offset += aligned_size(rectangle.num_bytes)


def push_through_host(
    buckets: Buckets,
    groups: ProcessGroups,
    memory: BucketMemory,
    wait_until_read: Callable[[int], None],
) -> Iterator[ReadableBucket]:
    """``run_push`` through memory of the hosts. Collective."""
    phases = HostExchange(buckets, groups, memory)
    return run_push(len(buckets.parts), phases, groups, wait_until_read)
