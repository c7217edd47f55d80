"""The plan of a push: which rank sends which rectangle of its shard to which worker of an engine.
Pure.

An engine's worker computes with a part of every tensor, and its own loaders take that part out of
the whole tensor. So the plan names places in Hugging Face's tensors: a worker gets exactly the
bytes that its loaders read, however the engine fuses them. An engine that cuts whole tensors by
itself is one of a single worker, whose memory is that of its host. Layers of one kind are cut
alike, so that the plan has one pattern for each kind; it grows neither with layers nor with
engines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import product, zip_longest
from math import prod
from typing import Literal, assert_never

from ctrl_megatron.engine_kinds import ENGINES, EngineName
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.fp8 import SCALES, quantised_specs
from ctrl_megatron.models.offload import aligned_size
from ctrl_megatron.models.rules import (
    ParamRule,
    hf_buffer_dtypes,
    hf_shapes,
    param_rules,
    trained_names,
)
from ctrl_megatron.models.shape import AnyShape, GroupedQueryAttention, HfTensor, ModelShape
from ctrl_megatron.models.shards import Piece, distinct_shards
from ctrl_megatron.parallel.layout import Indices, Layout, MeshName
from ctrl_megatron.parallel.placement import EnginePlace, Placement
from ctrl_megatron.rollout.weight_chunks import DTYPE_BYTES, spec_bytes
from ctrl_megatron.types import TensorSpec

_VOCABULARY_MULTIPLE = 64
"""vLLM and SGLang pad the vocabulary to a multiple of it before they split it."""
_SENT_WHOLE = 1 << 20
"""Bytes below which a worker gets a part from one sender; more messages would cost more than they
balance."""

Sent = Literal["merged", "trained"]
"""The tensors of a model that are sent: its weights, with adapters merged into them; or those that
training changes, adapters by themselves."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(first index, extent) of a rectangle of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCut:
    """How the workers of an engine cut a model."""

    tensor: int = 1
    """Number of workers."""
    spread_experts: bool = False
    """Each worker has some experts as a whole; otherwise it has a part of each expert."""
    width_unit: int | None = None
    """Workers' parts of the width of MLPs and experts are multiples of it, so that the last workers
    may have less or nothing; None where the number of workers divides every width."""


def engine_cut(
    name: EngineName, tensor: int, arguments: Mapping[str, object], *, on_cpu: bool
) -> EngineCut:
    """How an engine of ``tensor`` workers with these arguments of its own constructor cuts a
    model."""
    spread = bool(arguments.get("enable_expert_parallel")) or arguments.get("ep_size", 1) != 1
    return EngineCut(
        tensor=tensor,
        spread_experts=spread and tensor > 1,
        width_unit=ENGINES[name].cpu_width_unit if on_cpu else None,
    )


WHOLE = EngineCut()
"""A single worker, which has the whole model."""
ONE_ENGINE = Placement(engines=(EnginePlace(number=0, host=0, devices=(0,)),))
"""An engine of one worker on the first host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """The engines that take the weights, and the form in which they get them."""

    dtype: str
    bucket_bytes: int
    """Most bytes of a bucket for a worker, unless it is one parameter that is larger."""
    placement: Placement = ONE_ENGINE
    cut: EngineCut = WHOLE
    """How every engine's workers cut the model, for media that bring a worker only its part."""
    sends: Sent = "merged"
    quantised: bool = False
    """Whether linear layers' weights are sent in 8 bits (``models.fp8``)."""

    def hosts_of(self, host: int) -> Sequence[int]:
        """The hosts of each engine that a host serves: all have the same, and only one engine
        spans several."""
        return next((engine.hosts for engine in self.placement.engines_served_by(host)), (host,))


def hf_specs(
    shape: AnyShape, dtype: str, sends: Sent = "merged", *, quantised: bool = False
) -> list[TensorSpec]:
    """The HF tensors that are sent, in checkpoint order, in ``dtype`` but for buffers and for what
    is ``quantised``."""
    own = hf_buffer_dtypes(shape)
    names = hf_shapes(shape.without_adapters).keys() if sends == "merged" else trained_names(shape)
    specs = [
        TensorSpec(name=name, dtype=own.get(name, dtype), shape=size)
        for name, size in hf_shapes(shape).items()
        if name in names
    ]
    return list(quantised_specs(specs)) if quantised else specs


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """The bucket of a whole tensor and its offset there, in bytes."""

    spec: TensorSpec
    bucket: int
    offset: int

    @property
    def end(self) -> int:
        """Offset in its bucket of the first byte after the tensor."""
        return self.offset + spec_bytes(self.spec)


def place_in_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> tuple[TensorPlace, ...]:
    """Tensors in order, each at an aligned offset; a full bucket begins a new one. A weight and its
    scales share a bucket."""
    places, bucket, used = [], 0, 0
    for spec in specs:
        size = aligned_size(spec_bytes(spec))
        if used and used + size > bucket_bytes and not spec.name.endswith(SCALES):
            bucket, used = bucket + 1, 0
        places.append(TensorPlace(spec=spec, bucket=bucket, offset=used))
        used += size
    return tuple(places)


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle of a rank's shard, and its place in a Hugging Face tensor and in a worker's part
    of it."""

    param: str
    piece: Piece
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.piece.extent) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Flow:
    """The rectangles of one shard that the workers with index ``worker`` need, one worker per
    engine."""

    mesh: MeshName
    at: Indices
    worker: int
    rectangles: tuple[Rectangle, ...]

    @property
    def num_bytes(self) -> int:
        return sum(rectangle.num_bytes for rectangle in self.rectangles)


@dataclass(frozen=True, slots=True)
class FlowShare:
    """The bytes of a flow from ``begin`` to ``end``, where the whole flow counts as ``of``."""

    giver: int
    engines: tuple[int, ...]
    """The engines that get it; the taker of one passes it on to that of the next."""
    begin: int
    end: int
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPart:
    """What a push sends at once: one parameter of a pipeline stage, or one of its HF tensors, with
    all shards."""

    pattern: int
    """The number of the layer's kind; -1 for the embedding, -2 for final norm and output."""
    number: int
    """The parameter's or tensor's number among those of the pattern."""
    pp: int
    chunk: int
    local: int = 0
    """The layer's number in its virtual stage."""
    layer: int = 0
    """The layer's number in the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What rank ``giver`` sends of a part to the workers with index ``worker``, one per engine."""

    part: PushPart
    giver: int
    takers: tuple[int, ...]
    """The ranks that receive for the workers, each from the one before; the first may be the
    giver."""
    engines: tuple[int, ...]
    """The engine of each taker."""
    worker: int
    rectangles: tuple[Rectangle, ...]

    @property
    def num_bytes(self) -> int:
        return sum(rectangle.num_bytes for rectangle in self.rectangles)


class PushPlan:
    """The plan for one layout of the trainer and one of the engines; equal on all ranks.

    ``takers`` are, for every engine, the rank that receives for each of its workers, or the number
    of the worker itself, behind those of the ranks. ``host_of_rank`` is the host of each of them.
    With ``host_memory`` all ranks of a host write the memory of its workers. They share the
    copying; tensors come one by one, in checkpoint order; and what comes from other hosts passes
    from taker to taker, so that no host sends a byte twice.
    A tensor that two parameters hold (tied embeddings) is sent from one of them. Raises UserError
    for sizes that no engine can split.
    """

    def __init__(
        self,
        shape: AnyShape,
        train: Layout,
        cut: EngineCut,
        takers: tuple[tuple[int, ...], ...],
        host_of_rank: tuple[int, ...],
        *,
        dtype: str,
        te_names: bool = False,
        sends: Sent = "merged",
        quantised: bool = False,
        host_memory: bool = False,
        sent_whole: int = _SENT_WHOLE,
    ) -> None:
        self.train, self.cut, self.takers, self.host_of_rank = train, cut, takers, host_of_rank
        self.patterns = _patterns(shape, train, cut, dtype, te_names, sends, quantised, host_memory)
        self.parts = _parts(shape, train, self.patterns)
        if host_memory:
            number_of = {name: number for number, name in enumerate(hf_shapes(shape))}
            self.parts = tuple(sorted(self.parts, key=lambda part: number_of[self.tensor(part)]))
        self._host_memory, self._sent_whole = host_memory, sent_whole
        self._holders = cache(self._find_holders)
        self._of_workers = cache(self._bytes_of_workers)

    def transfers(self, rank: int | None = None) -> Iterator[Transfer]:
        """The transfers in which ``rank`` takes part, part by part; all of them if it is None."""
        involved = cache(partial(self._involved, rank))
        for part in self.parts:
            for flow, takers in involved(part.pattern, part.number, part.pp):
                for share in self.shares(part, flow, rank):
                    if rectangles := _cut(flow.rectangles, share):
                        yield Transfer(
                            part=part,
                            giver=share.giver,
                            takers=tuple(takers[engine] for engine in share.engines),
                            engines=share.engines,
                            worker=flow.worker,
                            rectangles=tuple(_in_place(r, part) for r in rectangles),
                        )

    def _involved(
        self, rank: int | None, pattern: int, number: int, pp: int
    ) -> list[tuple[Flow, tuple[int, ...]]]:
        """(flow, its takers) of a parameter, where ``rank`` holds or takes it."""
        taken = {
            w
            for w, takers in enumerate(self.receiving_ranks_by_worker)
            if rank is None or rank in takers
        }
        return [
            (flow, self.receiving_ranks_by_worker[flow.worker])
            for flow in self.patterns[pattern][number]
            if flow.worker in taken or rank in self._holders(flow.mesh, flow.at, pp)
        ]

    def _find_holders(self, mesh: MeshName, at: Indices, pp: int) -> tuple[int, ...]:
        return self.train.ranks_at(mesh, (*at, ("pp", pp)))

    @cached_property
    def receiving_ranks_by_worker(self) -> tuple[tuple[int, ...], ...]:
        """Worker -> the ranks that receive for it, engine by engine."""
        return tuple(zip(*self.takers, strict=True))

    def sends_whole(self, flow: Flow) -> bool:
        """Whether a worker gets all of the flow from one rank, since it is small."""
        return flow.num_bytes < self._sent_whole

    def shares(self, part: PushPart, flow: Flow, rank: int | None = None) -> tuple[FlowShare, ...]:
        """Who sends a flow of ``part`` to which engine, as far as ``rank`` sends or takes it."""
        holders, whole = self._holders(flow.mesh, flow.at, part.pp), self.sends_whole(flow)
        turn = part.layer % len(holders) if whole else 0
        takers = self.receiving_ranks_by_worker[flow.worker]
        by_host = self._host_memory
        return _shares(holders, takers, self.host_of_rank, rank, whole, turn, by_host)

    def engine_bytes(self) -> int:
        """Bytes that one engine computes with, over all its workers, without padding."""
        return sum(flow.num_bytes for part in self.parts for flow in self.flows(part))

    def flows(self, part: PushPart) -> tuple[Flow, ...]:
        """The flows of a part to the workers, in the names of its pattern."""
        return self.patterns[part.pattern][part.number]

    def tensor(self, part: PushPart) -> str:
        """The first HF tensor of a part."""
        return _in_place(self.flows(part)[0].rectangles[0], part).piece.hf

    def rectangles(self, part: PushPart) -> Iterator[tuple[int, Rectangle]]:
        """(worker, rectangle) of everything that the workers need of a part."""
        for flow in self.flows(part):
            for rectangle in flow.rectangles:
                yield flow.worker, _in_place(rectangle, part)

    def buckets(self, bucket_bytes: int) -> list[tuple[PushPart, ...]]:
        """The parts in the order of the push; no worker gets more than ``bucket_bytes`` of a
        bucket, unless it is a single part."""
        buckets: list[list[PushPart]] = []
        used: list[int] = []
        for part in self.parts:
            own = self._of_workers(part.pattern, part.number)
            used = [sum(pair) for pair in zip(used, own, strict=True)] if buckets else []
            if not used or max(used) > bucket_bytes:
                buckets.append([])
                used = list(own)
            buckets[-1].append(part)
        return [tuple(bucket) for bucket in buckets]

    def max_worker_bytes(self, bucket: Sequence[PushPart]) -> int:
        """Bytes of the bucket for the worker that gets most of it."""
        parts = (self._of_workers(part.pattern, part.number) for part in bucket)
        return max(map(sum, zip(*parts, strict=True)))

    def _bytes_of_workers(self, pattern: int, number: int) -> list[int]:
        """Bytes of a parameter for each worker."""
        sizes = [0] * self.cut.tensor
        for flow in self.patterns[pattern][number]:
            sizes[flow.worker] += flow.num_bytes
        return sizes


def receiving_ranks_of_engines(
    placement: Placement, host_of_rank: Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """(takers, host of every rank) where ranks receive for workers: the one with the same device,
    and where engines have devices of their own, the host's ranks in turn."""
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(host_of_rank):
        ranks.setdefault(host, []).append(rank)
    takers = tuple(
        tuple(
            ranks[host][device % len(ranks[host])]
            for device, host in zip(engine.devices, engine.host_of_worker, strict=True)
        )
        for engine in placement.engines
    )
    return takers, tuple(host_of_rank)


def workers_as_receivers(
    placement: Placement, host_of_rank: Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """(takers, host of every number) where workers receive by themselves: they have the numbers
    behind those of the ranks."""
    hosts, takers = list(host_of_rank), []
    for engine in placement.engines:
        first = len(hosts)
        hosts += engine.host_of_worker
        takers.append(tuple(range(first, len(hosts))))
    return tuple(takers), tuple(hosts)


def one_worker_on_each_host(placement: Placement) -> Placement:
    """Engines of one worker in the place of the engines of a host, which read the same memory."""
    return Placement(
        engines=tuple(
            EnginePlace(number=number, host=host, devices=(0,))
            for number, host in enumerate(placement.hosts)
        )
    )


def one_engine_of_each_host(placement: Placement) -> Placement:
    """The first engine of every host: the engines of a host that read the same memory count as
    one."""
    first = dict.fromkeys(placement.engines_on(host)[0] for host in placement.hosts)
    return Placement(engines=tuple(first))


def _parts(
    shape: AnyShape, train: Layout, patterns: Mapping[int, Sequence[object]]
) -> tuple[PushPart, ...]:
    """Every part of the model; the stages take turns, so that all of them send at once."""
    queues: list[list[list[PushPart]]] = [[] for _ in range(train.pipeline)]

    def put(pattern: int, pp: int, chunk: int, local: int = 0, layer: int = 0) -> None:
        queues[pp].append(
            [
                PushPart(pattern=pattern, number=n, pp=pp, chunk=chunk, local=local, layer=layer)
                for n in range(len(patterns.get(pattern, ())))
            ]
        )

    put(-1, 0, 0)
    if isinstance(shape, ModelShape):
        kinds = list(dict.fromkeys(own := shape.layer_kinds))
        for pp, chunk in train.virtual_stages():
            for local, layer in enumerate(train.layers(shape.num_layers, pp=pp, chunk=chunk)):
                put(kinds.index(own[layer]), pp, chunk, local, layer)
    put(-2, train.pipeline - 1, train.virtual_pipeline - 1)
    return tuple(
        part
        for turn in zip_longest(*queues, fillvalue=[])
        for parts in zip_longest(*turn)
        for part in parts
        if part is not None
    )


@lru_cache(maxsize=8)
def _patterns(
    shape: AnyShape,
    train: Layout,
    cut: EngineCut,
    dtype: str,
    te_names: bool,
    sends: Sent,
    quantised: bool,
    by_tensor: bool,
) -> Mapping[int, tuple[tuple[Flow, ...], ...]]:
    """Pattern -> the flows of each of its parameters, or of each of its HF tensors, from a model
    with one layer of each kind on one pipeline stage."""
    small = shape
    if isinstance(shape, ModelShape):
        small = shape.with_each_kind_once
    stage = replace(train, pipeline=1, virtual_pipeline=1)
    specs = hf_specs(small, dtype, sends, quantised=quantised)
    needed, dtypes = _needed(small, cut), {spec.name: spec.dtype for spec in specs}
    flows_of: dict[int, dict[str, list[Flow]]] = {}
    for param in distinct_shards(small, stage, pp=0, chunk=0, te_names=te_names):
        at = tuple(index for index in param.at if index[0] != "pp")
        needs: dict[tuple[str, int], list[Rectangle]] = {}
        for piece in param.pieces:
            for worker, box in needed[piece.hf] if piece.hf in dtypes else ():
                if (common := _common(piece, box)) is not None:
                    rectangle = Rectangle(param.name, common, dtypes[piece.hf])
                    tensor = piece.hf if by_tensor else param.name
                    needs.setdefault((tensor, worker), []).append(rectangle)
        pattern = _pattern_of(param.name) if isinstance(shape, ModelShape) else -2
        for (tensor, worker), rectangles in needs.items():
            flows = flows_of.setdefault(pattern, {}).setdefault(tensor, [])
            flows.append(Flow(param.mesh, at, worker, tuple(rectangles)))
    return {
        pattern: tuple(tuple(flows) for flows in of_part.values())
        for pattern, of_part in flows_of.items()
    }


def _pattern_of(param: str) -> int:
    module, *rest = param.split(".")
    if module == "embedding":
        return -1
    return int(rest[1]) if module == "decoder" and rest[0] == "layers" else -2


def _in_place(rectangle: Rectangle, part: PushPart) -> Rectangle:
    """The same rectangle of the part's own layer."""
    if part.pattern < 0:
        return rectangle
    piece = rectangle.piece
    return Rectangle(
        _numbered(rectangle.param, part.local),
        replace(piece, hf=_numbered(piece.hf, part.layer)),
        rectangle.dtype,
    )


def _numbered(name: str, layer: int) -> str:
    """The name with another layer's number, the first in the names of all families."""
    return re.sub(r"\.\d+\.", f".{layer}.", name, count=1)


def _needed(shape: AnyShape, cut: EngineCut) -> Mapping[str, tuple[tuple[int, Box], ...]]:
    """HF tensor -> the (worker, rectangle) that each worker's loaders read of it."""
    return {
        tensor.name: tuple(
            (worker, box)
            for worker in range(cut.tensor)
            if (box := _box(shape, cut, rule, number, tensor, expert, worker)) is not None
        )
        for rule in param_rules(shape)
        for layer, expert in product(rule.layers, range(rule.experts))
        for number, tensor in enumerate(rule.tensors(layer, expert))
    }


def _box(
    shape: AnyShape,
    cut: EngineCut,
    rule: ParamRule,
    number: int,
    tensor: HfTensor,
    expert: int,
    worker: int,
) -> Box | None:
    """The rectangle of ``tensor``, the rule's tensor of that ``number``, that a worker reads."""
    whole: Box = ((0,) * len(tensor.shape), tensor.shape)
    if cut.tensor == 1 or rule.stacked or tensor.sections:
        return whole
    if rule.mesh == "expert" and cut.spread_experts:
        own = _divided(rule.experts, cut.tensor, "experts")
        return whole if expert // own == worker else None
    match rule.kind:
        case "replicated":
            return whole
        case "row" | "column":
            padded = cut.width_unit and ".mlp." in rule.megatron
            unit = cut.tensor * cut.width_unit if padded and cut.width_unit else 1
            return _part_of(tensor, int(rule.kind == "row"), worker, cut.tensor, unit)
        case "qkv":
            groups = _groups(shape)
            if number == 0 or groups >= cut.tensor:
                _divided(groups if number else _heads(shape), cut.tensor, "heads")
                return _part_of(tensor, 0, worker, cut.tensor)
            # Several workers share the keys and values of a group.
            return _part_of(tensor, 0, worker // _divided(cut.tensor, groups, "workers"), groups)
        case "vocab":
            return _part_of(tensor, 0, worker, cut.tensor, _VOCABULARY_MULTIPLE)
        case "shard":
            raise ValueError("engines' parts of a model are known only for strategy 'megatron'")
        case other:
            assert_never(other)


def _groups(shape: AnyShape) -> int:
    assert isinstance(shape.attention, GroupedQueryAttention)
    return shape.attention.groups


def _heads(shape: AnyShape) -> int:
    assert isinstance(shape.attention, GroupedQueryAttention)
    return shape.attention.heads


def _divided(size: int, parts: int, what: str) -> int:
    if size % parts:
        raise UserError(
            f"an engine's tensor_model_parallel_size does not fit the model: {size} {what} do not "
            f"divide over {parts}",
            remedy="choose a divisor",
        )
    return size // parts


def _part_of(tensor: HfTensor, dim: int, index: int, parts: int, unit: int = 1) -> Box | None:
    """The part of that ``index`` of a tensor that is padded along ``dim`` to a multiple of ``unit``
    and then cut; None for one that is only padding."""
    size = tensor.shape[dim]
    share = _divided(-(-size // unit) * unit, parts, f"rows or columns of {tensor.name}")
    first = min(size, index * share)
    count = min(size, first + share) - first
    start, extent = [0] * len(tensor.shape), list(tensor.shape)
    start[dim], extent[dim] = first, count
    return (tuple(start), tuple(extent)) if count else None


def _common(piece: Piece, box: Box) -> Piece | None:
    """The intersection of ``piece`` and ``box``; None if it is empty."""
    first = tuple(map(max, piece.hf_start, box[0]))
    ends = zip(piece.hf_start, piece.extent, *box, strict=True)
    extent = tuple(min(a + n, b + m) - f for (a, n, b, m), f in zip(ends, first, strict=True))
    if min(extent) <= 0:
        return None
    moved = zip(piece.start, first, piece.hf_start, strict=True)
    start = tuple(own + f - a for own, f, a in moved)
    return Piece(hf=piece.hf, hf_start=first, start=start, extent=extent)


@lru_cache(maxsize=1 << 14)
def _shares(
    holders: tuple[int, ...],
    takers: tuple[int, ...],
    host_of_rank: tuple[int, ...],
    rank: int | None,
    whole: bool,
    turn: int,
    host_memory: bool,
) -> tuple[FlowShare, ...]:
    """Who sends a flow to which engine, as far as ``rank`` sends or takes it.

    A taker that holds the shard sends it to itself, unless all ranks of its host write its memory.
    Holders of a host serve the other takers of that host, and all holders together serve the takers
    of all other hosts.
    """
    itself = frozenset() if host_memory else frozenset(holders)
    of_host: dict[int, list[int]] = {}
    for holder in holders:
        of_host.setdefault(host_of_rank[holder], []).append(holder)
    shares = [FlowShare(t, (engine,), 0, 1, 1) for engine, t in enumerate(takers) if t in itself]
    waiting: dict[int | None, list[int]] = {}
    for engine, taker in enumerate(takers):
        if taker not in itself:
            host = host_of_rank[taker]
            waiting.setdefault(host if host in of_host else None, []).append(engine)
    for host, engines in waiting.items():
        givers = holders if host is None else of_host[host]
        if host is None and host_memory:
            hosts = {engine: host_of_rank[takers[engine]] for engine in engines}
            shares += _relayed(givers, hosts, host_of_rank, whole, turn)
            continue
        for number, engine in enumerate(engines):
            if rank is None or rank in holders or rank == takers[engine]:
                shares += _line(givers, engine, number, len(engines), whole, turn)
    return tuple(
        share
        for share in shares
        if rank in (None, share.giver) or rank in [takers[engine] for engine in share.engines]
    )


def _relayed(
    givers: Sequence[int],
    hosts: Mapping[int, int],
    host_of_rank: Sequence[int],
    whole: bool,
    turn: int,
) -> Iterator[FlowShare]:
    """The shares of all engines of ``hosts`` (engine -> host), each from one giver through all of
    them. It begins with the host after the giver's, so that several givers use different links."""
    count = len(givers)
    for number, giver in enumerate(givers):
        own = host_of_rank[giver]
        line = tuple(sorted(hosts, key=lambda engine: (hosts[engine] < own, hosts[engine])))
        if not whole:
            yield FlowShare(giver, line, number, number + 1, count)
        elif number == turn % count:
            yield FlowShare(giver, line, 0, 1, 1)


def _line(
    givers: Sequence[int], engine: int, number: int, engines: int, whole: bool, turn: int
) -> Iterator[FlowShare]:
    """The shares of the engine of that ``number`` among ``engines``, whose needs are one line that
    the givers cut into equal parts. With ``whole`` no engine's need is cut, and ``turn`` moves the
    givers on."""
    count = len(givers)
    low, high = number * count, (number + 1) * count
    if whole:
        yield FlowShare(givers[(low // engines + turn) % count], (engine,), 0, 1, 1)
        return
    for giver in range(low // engines, (high - 1) // engines + 1):
        begin, end = max(low, giver * engines) - low, min(high, (giver + 1) * engines) - low
        yield FlowShare(givers[giver], (engine,), begin, end, count)


def _cut(rectangles: Sequence[Rectangle], share: FlowShare) -> list[Rectangle]:
    """The share's part of the rectangles, in whole rows."""
    if (share.begin, share.end) == (0, share.of):
        return list(rectangles)
    total = sum(rectangle.num_bytes for rectangle in rectangles)
    found, offset = [], 0
    for rectangle in rectangles:
        piece, size = rectangle.piece, rectangle.num_bytes
        rows = piece.extent[0]
        first, last = (
            # The first row that begins at or behind the border.
            min(rows, max(0, -((offset * share.of - total * border) * rows // (size * share.of))))
            for border in (share.begin, share.end)
        )
        if last > first:
            part = replace(
                piece,
                hf_start=(piece.hf_start[0] + first, *piece.hf_start[1:]),
                start=(piece.start[0] + first, *piece.start[1:]),
                extent=(last - first, *piece.extent[1:]),
            )
            found.append(replace(rectangle, piece=part))
        offset += size
    return found
