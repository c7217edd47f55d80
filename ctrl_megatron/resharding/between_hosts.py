"""Transport between hosts: what one host wrote into its bucket goes into the bucket of another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ctrl_megatron.parallel.groups import Groups
from ctrl_megatron.resharding.plan import Route, Slice, spec_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes of a bucket that go from one host to another."""

    route: Route
    start: int
    stop: int


def spans(slices: Iterable[Slice]) -> tuple[Span, ...]:
    """What has to be sent of one bucket, neighbours that go the same way together. Pure."""
    found: list[Span] = []
    growing: dict[Route, int] = {}
    for place in slices:
        stop = place.offset + spec_bytes(place.spec)
        grown: dict[Route, int] = {}
        for route in place.routes:
            if route in growing:
                index, start = growing[route], found[growing[route]].start
                found[index] = Span(route=route, start=start, stop=stop)
            else:
                index = len(found)
                found.append(Span(route=route, start=place.offset, stop=stop))
            grown[route] = index
        growing = grown
    return tuple(found)


def exchange(slices: Iterable[Slice], memory: torch.Tensor, groups: Groups) -> None:
    """Bring one bucket, uint8 ``memory``, to the hosts that lack parts of it.

    Called by the first rank of every host; over gloo, from host memory to host memory.
    """
    running = []
    for tag, span in enumerate(spans(slices)):
        part, (giver, taker) = memory[span.start : span.stop], span.route
        if giver == groups.here:
            to = groups.hosts.first_rank(taker)
            running.append(dist.isend(part, to, group=groups.host, tag=tag))
        elif taker == groups.here:
            source = groups.hosts.first_rank(giver)
            running.append(dist.irecv(part, source, group=groups.host, tag=tag))
    for work in running:
        assert work is not None
        work.wait()
