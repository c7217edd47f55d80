"""The plan of a push: which rank copies which rectangle of its shard to which byte of which bucket,
and which host sends it to which. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ctrl_megatron.models.rules import hf_shapes
from ctrl_megatron.models.shape import ModelShape
from ctrl_megatron.models.shards import Piece, shard_params
from ctrl_megatron.parallel.layout import Layout
from ctrl_megatron.rollout.weight_chunks import spec_bytes
from ctrl_megatron.types import TensorSpec

ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """The form and the hosts in which engines get whole HF tensors, which they slice themselves."""

    dtype: str
    bucket_bytes: int
    """Most bytes of a bucket, unless it is one tensor that is larger."""
    hosts: tuple[int, ...] = (0,)
    """The hosts with engines: their buckets must contain every tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A rectangle of one rank's shard."""

    tp: int
    pp: int
    dp: int
    """The data-parallel replica that copies: all have the same weights and share the copying."""
    chunk: int
    param: str
    piece: Piece


Route = tuple[int, ...]
"""Hosts in the order in which bytes pass through them: the first writes, each sends to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where a whole tensor is in the buckets, on all hosts alike, and which ranks fill it."""

    spec: TensorSpec
    bucket: int
    offset: int
    routes: tuple[Route, ...] = ()
    """From hosts that write the tensor to those with an engine that have no part of it."""
    sources: tuple[Source, ...] = ()
    """The rectangles that it consists of, once for every host that writes it."""


def hf_specs(shape: ModelShape, dtype: str) -> list[TensorSpec]:
    """Every HF tensor of the model in checkpoint order."""
    return [TensorSpec(name=n, dtype=dtype, shape=s) for n, s in hf_shapes(shape).items()]


def place_in_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> tuple[TensorPlace, ...]:
    """Tensors in order, each at an aligned offset; a full bucket begins a new one."""
    places, bucket, used = [], 0, 0
    for spec in specs:
        size = -(-spec_bytes(spec) // ALIGNMENT) * ALIGNMENT
        if used and used + size > bucket_bytes:
            bucket, used = bucket + 1, 0
        places.append(TensorPlace(spec=spec, bucket=bucket, offset=used))
        used += size
    return tuple(places)


@lru_cache(maxsize=8)
def plan(
    shape: ModelShape,
    train: Layout,
    engine: EngineLayout,
    te_names: bool = False,
    host_of_rank: tuple[int, ...] | None = None,
) -> tuple[TensorPlace, ...]:
    """The places, routes and sources that bring every HF tensor of the model to every host with an
    engine once.

    Tied embeddings are sent from the first stage only, under the embedding's name. A host writes
    what its own ranks have, and the rest is sent to it. Copying is spread over the data-parallel
    replicas, the least loaded one next. ``host_of_rank`` is every rank's host, by default host 0;
    the tensor-parallel ranks of a group must be on one host.
    """
    host_of_rank = host_of_rank or (0,) * train.world_size
    specs = hf_specs(shape, engine.dtype)
    pieces_of: dict[str, list[tuple[int, int, int, str, Piece]]] = {spec.name: [] for spec in specs}
    for pp, chunk in train.stages():
        for tp in range(train.tensor):
            for param in shard_params(shape, train, tp=tp, pp=pp, chunk=chunk, te_names=te_names):
                if shape.tied_embeddings and param.name == "output_layer.weight":
                    continue
                for piece in param.pieces:
                    # Weights that every tensor rank has completely are sent once.
                    if piece.extent == hf_shapes(shape)[piece.hf] and tp > 0:
                        continue
                    pieces_of[piece.hf].append((tp, pp, chunk, param.name, piece))
    load = [0] * train.data
    places = []
    for place in place_in_buckets(specs, engine.bucket_bytes):
        pieces = pieces_of[place.spec.name]
        (stage,) = {pp for _, pp, *_ in pieces}
        ranks = (train.rank(tp=0, pp=stage, dp=dp) for dp in range(train.data))
        holders = [host_of_rank[rank] for rank in ranks]
        replicas, routes = _replicas(holders, engine.hosts, load, spec_bytes(place.spec))
        sources = tuple(
            Source(tp=tp, pp=pp, dp=dp, chunk=chunk, param=name, piece=piece)
            for dp in replicas
            for tp, pp, chunk, name, piece in pieces
        )
        places.append(replace(place, routes=routes, sources=sources))
    return tuple(places)


def _replicas(
    holders: Sequence[int], readers: Sequence[int], load: list[int], size: int
) -> tuple[tuple[int, ...], tuple[Route, ...]]:
    """The replicas that write a tensor, at most one per host, and the routes from their hosts.

    ``holders`` are the hosts of the replicas, ``readers`` those with engines, and ``load`` the
    bytes that each replica has to write so far, which this call increases. Readers pass the tensor
    on, so that no host sends a byte twice, however many there are; a route begins with the host
    after the writer's, so that several writers use different links.
    """
    writers: dict[int, int] = {}
    served: dict[int, list[int]] = {}
    for reader in readers:
        local = [dp for dp, host in enumerate(holders) if host == reader]
        replica = min(local or range(len(holders)), key=load.__getitem__)
        load[replica] += size
        host = holders[replica]
        writers.setdefault(host, replica)
        if host != reader:
            served.setdefault(host, []).append(reader)
    routes = ((w, *sorted(to, key=lambda reader: (reader < w, reader))) for w, to in served.items())
    return tuple(writers.values()), tuple(routes)
