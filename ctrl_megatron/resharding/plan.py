"""The plan of a push: which rank copies which rectangle of its shard to which byte of which bucket,
and which host sends it to which. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from typing import Literal

from ctrl_megatron.models.fp8 import SCALES, quantised_specs
from ctrl_megatron.models.offload import aligned
from ctrl_megatron.models.rules import hf_buffers, hf_shapes, trained_names
from ctrl_megatron.models.shape import AnyShape
from ctrl_megatron.models.shards import Piece, distinct_shards
from ctrl_megatron.parallel.layout import Indices, Layout, MeshName
from ctrl_megatron.parallel.placement import EnginePlace, Placement
from ctrl_megatron.resharding.shard_plan import EngineCut
from ctrl_megatron.rollout.weight_chunks import spec_bytes
from ctrl_megatron.types import TensorSpec

Sent = Literal["merged", "trained"]
"""The tensors of a model that are sent: its weights, with adapters merged into them; or those that
training changes, adapters by themselves."""
ONE_ENGINE = Placement(engines=(EnginePlace(number=0, host=0, devices=(0,)),))
"""An engine of one worker on the first host."""
WHOLE = EngineCut()
"""A worker that has the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """The form and the hosts in which engines get whole HF tensors, which they slice themselves."""

    dtype: str
    bucket_bytes: int
    """Most bytes of a bucket, unless it is one tensor that is larger."""
    placement: Placement = ONE_ENGINE
    """The engines that take the weights."""
    cut: EngineCut = WHOLE
    """How every engine's workers cut the model, for media that bring a worker only its part."""
    sends: Sent = "merged"
    quantised: bool = False
    """Whether linear layers' weights are sent in 8 bits (``models.fp8``)."""

    @property
    def hosts(self) -> tuple[int, ...]:
        """The hosts with engines: their buckets must contain every tensor."""
        return self.placement.hosts

    def hosts_of(self, host: int) -> Sequence[int]:
        """The hosts of each engine that a host serves: all have the same, and only one engine
        spans several."""
        return next((engine.hosts for engine in self.placement.served_on(host)), (host,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A rectangle of one rank's shard."""

    rank: int
    chunk: int
    param: str
    piece: Piece


Route = tuple[int, ...]
"""Hosts in the order in which bytes pass through them: the first writes, each sends to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where a whole tensor is in the buckets, on all hosts alike, and which ranks of a host fill
    it."""

    spec: TensorSpec
    bucket: int
    offset: int
    routes: tuple[Route, ...] = ()
    """From hosts that write the tensor to those with an engine that have no part of it."""
    sources: tuple[Source, ...] = ()
    """The rectangles that it consists of, if the host for which the plan was made writes it."""


def hf_specs(
    shape: AnyShape, dtype: str, sends: Sent = "merged", *, quantised: bool = False
) -> list[TensorSpec]:
    """The HF tensors that are sent, in checkpoint order, in ``dtype`` but for buffers and for what
    is ``quantised``."""
    own = hf_buffers(shape)
    names = hf_shapes(shape.base).keys() if sends == "merged" else trained_names(shape)
    specs = [
        TensorSpec(name=name, dtype=own.get(name, dtype), shape=size)
        for name, size in hf_shapes(shape).items()
        if name in names
    ]
    return list(quantised_specs(specs)) if quantised else specs


def place_in_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> tuple[TensorPlace, ...]:
    """Tensors in order, each at an aligned offset; a full bucket begins a new one. A weight and its
    scales share a bucket."""
    places, bucket, used = [], 0, 0
    for spec in specs:
        size = aligned(spec_bytes(spec))
        if used and used + size > bucket_bytes and not spec.name.endswith(SCALES):
            bucket, used = bucket + 1, 0
        places.append(TensorPlace(spec=spec, bucket=bucket, offset=used))
        used += size
    return tuple(places)


@dataclass(frozen=True, slots=True)
class _Held:
    """A rectangle of a tensor and the ranks that have it."""

    mesh: MeshName
    at: Indices
    chunk: int
    param: str
    piece: Piece


@lru_cache(maxsize=8)
def plan(
    shape: AnyShape,
    train: Layout,
    engine: EngineLayout,
    te_names: bool = False,
    host_of_rank: tuple[int, ...] | None = None,
    here: int = 0,
) -> tuple[TensorPlace, ...]:
    """The places and routes that bring every HF tensor of the model to every host with an engine
    once, and the sources of what host ``here`` writes.

    A tensor that two parameters hold (tied embeddings) is sent from one of them. A host writes what
    its own ranks have, and the rest is sent to it. The ranks of a host share the copying, the least
    loaded one next. ``host_of_rank`` is every rank's host, by default host 0. Raises ValueError if
    no host has every piece of a tensor.
    """
    host_of_rank = host_of_rank or (0,) * train.world_size
    held: dict[str, list[_Held]] = {}
    for pp, chunk in train.stages():
        for param in distinct_shards(shape, train, pp=pp, chunk=chunk, te_names=te_names):
            for piece in () if param.copy else param.pieces:
                part = _Held(param.mesh, param.at, chunk, param.name, piece)
                held.setdefault(piece.hf, []).append(part)

    @cache
    def hosts(mesh: MeshName, at: Indices) -> dict[int, list[int]]:
        """The ranks with a piece by their hosts; the same for very many pieces."""
        found: dict[int, list[int]] = {}
        for rank in train.holders(mesh, at):
            found.setdefault(host_of_rank[rank], []).append(rank)
        return found

    @cache
    def givers_and_takers(
        parts: frozenset[tuple[MeshName, Indices]],
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The hosts with every piece of a tensor, and those with an engine that lack some."""
        givers = set.intersection(*(set(hosts(*part)) for part in parts))
        return tuple(sorted(givers)), tuple(h for h in engine.hosts if h not in givers)

    load_of_host, load_of_rank = [0] * (1 + max(host_of_rank)), [0] * train.world_size
    readers, places = frozenset(engine.hosts), []
    specs = hf_specs(shape, engine.dtype, engine.sends, quantised=engine.quantised)
    for place in place_in_buckets(specs, engine.bucket_bytes):
        name, size = place.spec.name, spec_bytes(place.spec)
        if name.endswith(SCALES):  # every host has them before a bucket is filled
            places.append(place)
            continue
        parts = held[name]
        givers, takers = givers_and_takers(frozenset((part.mesh, part.at) for part in parts))
        if not givers:
            raise ValueError(f"no host has all of {name}; its pieces are on several hosts")
        routes = _routes(givers, takers, load_of_host)
        writers = readers.intersection(givers) | {route[0] for route in routes}
        for host in (*writers, *(route[0] for route in routes for _ in route[1:])):
            load_of_host[host] += size
        sources = []
        for part in parts if here in writers else ():
            rank = min(hosts(part.mesh, part.at)[here], key=load_of_rank.__getitem__)
            load_of_rank[rank] += prod(part.piece.extent)
            sources.append(Source(rank=rank, chunk=part.chunk, param=part.param, piece=part.piece))
        places.append(replace(place, routes=routes, sources=tuple(sources)))
    return tuple(places)


def _routes(givers: Sequence[int], takers: Sequence[int], load: Sequence[int]) -> tuple[Route, ...]:
    """The routes of a tensor from ``givers`` to ``takers``, both ascending.

    ``load`` are the bytes that each host has to write and send so far; the hosts with least share
    the takers. Takers pass the tensor on, so that no host sends a byte twice, however many there
    are; a route begins with the host after the giver, so that several givers use different links.
    """
    if not takers:
        return ()
    order = sorted(givers, key=load.__getitem__)[: len(takers)]
    served = ((giver, takers[first :: len(order)]) for first, giver in enumerate(order))
    return tuple((g, *sorted(to, key=lambda taker: (taker < g, taker))) for g, to in served)
