"""Buckets of weights on every host: filled by its ranks, exchanged between hosts over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.resharding.plan import Route, TensorPlace
from ctrl_megatron.resharding.sources import WeightSource
from ctrl_megatron.rollout.weight_chunks import spec_bytes, tensor_at

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBucket:
    """A bucket that is complete in this host's memory if the host has an engine."""

    number: int
    memory: torch.Tensor
    """uint8; all ranks of the host have mapped it."""
    places: tuple[TensorPlace, ...]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, view of the memory) of every tensor."""
        for place in self.places:
            yield place.spec.name, tensor_at(self.memory, place.spec, place.offset)


def fill_buckets(
    source: WeightSource,
    memory: Sequence[torch.Tensor],
    groups: ProcessGroups,
    wait_until_read: Callable[[int], None] = lambda bucket: None,
) -> Iterator[FilledBucket]:
    """Yield each bucket once it is complete on every host with an engine. Collective.

    ``memory`` are uint8 tensors that the ranks of a host share; buckets use them in turn.
    ``wait_until_read(bucket)`` returns when the engines beside this rank have read ``bucket``; it
    is called before that bucket's memory is filled again.
    """
    for number in range(1 + max(place.bucket for place in source.places)):
        if number >= len(memory):
            wait_until_read(number - len(memory))
        groups.barrier()
        shared = memory[number % len(memory)]
        source.fill(number, shared)
        groups.barrier()
        places = _places_of(source, number)
        if any(place.routes for place in places):
            if groups.is_first_here:
                _exchange(places, shared, groups)
            groups.barrier()
        yield FilledBucket(number=number, memory=shared, places=places)


def filled_buckets(source: WeightSource, memory: Sequence[torch.Tensor]) -> Iterator[FilledBucket]:
    """The buckets that ``fill_buckets`` has left in ``memory``, which has as many tensors."""
    for number, shared in enumerate(memory):
        yield FilledBucket(number=number, memory=shared, places=_places_of(source, number))


def _places_of(source: WeightSource, bucket: int) -> tuple[TensorPlace, ...]:
    return tuple(place for place in source.places if place.bucket == bucket)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteSpan:
    """Consecutive bytes of a bucket that take the same route."""

    route: Route
    start: int
    stop: int


def byte_spans(places: Iterable[TensorPlace]) -> tuple[ByteSpan, ...]:
    """The bytes of one bucket that hosts send; neighbours on the same route are joined. Pure."""
    spans: list[ByteSpan] = []
    growing: dict[Route, int] = {}
    for place in places:
        stop = place.offset + spec_bytes(place.spec)
        grown: dict[Route, int] = {}
        for route in place.routes:
            index = growing.get(route, len(spans))
            if index == len(spans):
                spans.append(ByteSpan(route=route, start=place.offset, stop=stop))
            spans[index] = ByteSpan(route=route, start=spans[index].start, stop=stop)
            grown[route] = index
        growing = grown
    return tuple(spans)


def pieces(spans: Iterable[ByteSpan]) -> list[ByteSpan]:
    """The spans cut into small pieces, so that a host passes on one piece while the next arrives;
    the first pieces of all spans come first. Pure."""
    cut = [
        (begin, ByteSpan(route=span.route, start=start, stop=min(start + _PIECE_BYTES, span.stop)))
        for span in spans
        for begin, start in enumerate(range(span.start, span.stop, _PIECE_BYTES))
    ]
    return [piece for _, piece in sorted(cut, key=lambda entry: entry[0])]


def _exchange(places: Iterable[TensorPlace], memory: torch.Tensor, groups: ProcessGroups) -> None:
    """Send the parts of one bucket, uint8 ``memory``, to the hosts that lack them, over gloo.

    The first rank of every host calls it.
    """
    running, arriving = [], []
    for tag, piece in enumerate(pieces(byte_spans(places))):
        if groups.here not in piece.route:
            continue
        part, position = memory[piece.start : piece.stop], piece.route.index(groups.here)
        before, after = piece.route[:position], piece.route[position + 1 :]
        to = [groups.hosts.first_rank(host) for host in after[:1]]
        if before:
            giver = groups.hosts.first_rank(before[-1])
            work = dist.irecv(part, group=groups.host, tag=tag, group_src=giver)
            arriving.append((work, part, to, tag))
        else:
            running += [_sent(part, rank, groups, tag) for rank in to]
    for work, part, to, tag in arriving:
        assert work is not None
        work.wait()
        running += [_sent(part, rank, groups, tag) for rank in to]
    for work in running:
        assert work is not None
        work.wait()


def _sent(part: torch.Tensor, rank: int, groups: ProcessGroups, tag: int) -> Any:
    return dist.isend(part, group=groups.host, tag=tag, group_dst=rank)
