"""The plan of a push from shard to shard: which rank sends which rectangle of its shard to which
worker of which engine. Pure.

An engine's worker computes with a part of every tensor, and its own loaders take that part out of
the whole tensor. So the plan names places in Hugging Face's tensors: a worker gets exactly the
bytes that its loaders read, however the engine fuses them. Layers of one kind are cut alike, so
that the plan has one pattern for each kind; it grows neither with layers nor with engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import product
from math import prod

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.rules import HfTensor, ParamRule, hf_buffers, rules
from ctrl_megatron.models.shape import GroupedQueryAttention, ModelShape
from ctrl_megatron.models.shards import Piece, distinct_shards
from ctrl_megatron.parallel.layout import Indices, Layout, MeshName
from ctrl_megatron.rollout.weight_chunks import DTYPE_BYTES

_VOCABULARY_MULTIPLE = 64
"""vLLM and SGLang pad the vocabulary to a multiple of it before they split it."""
_SENT_WHOLE = 1 << 20
"""Bytes below which a worker gets a part from one sender; more messages would cost more than they
balance."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(first index, extent) of a rectangle of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCut:
    """How the workers of an engine cut a model."""

    tensor: int = 1
    """Number of workers."""
    spread_experts: bool = False
    """Each worker has some experts as a whole; otherwise it has a part of each expert."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle of a rank's shard, and its place in a Hugging Face tensor."""

    param: str
    piece: Piece
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the rectangle."""
        return prod(self.piece.extent) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Flow:
    """What the workers of one number need of one shard."""

    mesh: MeshName
    at: Indices
    worker: int
    rectangles: tuple[Rectangle, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all rectangles."""
        return sum(rectangle.num_bytes for rectangle in self.rectangles)


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a flow: from ``begin`` to ``end`` when its bytes are counted as ``of``."""

    giver: int
    engine: int
    begin: int
    end: int
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlace:
    """An embedding, a layer or an output, and the stage that has it."""

    pattern: int
    """The number of the layer's kind; -1 for the embedding, -2 for final norm and output."""
    pp: int
    chunk: int
    local: int = 0
    """The layer's number in its virtual stage."""
    layer: int = 0
    """The layer's number in the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Rectangles that one rank sends for one worker of one engine."""

    part: PartPlace
    giver: int
    taker: int
    """The rank that receives for the worker; it may be the giver."""
    engine: int
    worker: int
    rectangles: tuple[Rectangle, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all rectangles."""
        return sum(rectangle.num_bytes for rectangle in self.rectangles)


class ShardPlan:
    """The plan for one layout of the trainer and one of the engines; equal on all ranks.

    ``takers`` are, for every engine, the rank that receives for each of its workers, and
    ``host_of_rank`` is every rank's host. Raises UserError for sizes that no engine can split.
    """

    def __init__(
        self,
        shape: ModelShape,
        train: Layout,
        cut: EngineCut,
        takers: tuple[tuple[int, ...], ...],
        host_of_rank: tuple[int, ...],
        *,
        dtype: str,
        te_names: bool = False,
        sent_whole: int = _SENT_WHOLE,
    ) -> None:
        self.train, self.cut, self.takers, self.host_of_rank = train, cut, takers, host_of_rank
        self.patterns = _patterns(shape, train, cut, dtype, te_names)
        self.parts = _parts(shape, train)
        self._sent_whole = sent_whole
        self._holders = cache(self._find_holders)

    def transfers(self, rank: int | None = None) -> Iterator[Transfer]:
        """What ``rank`` sends and receives, part by part in the order of the push; what all ranks
        do if it is None."""
        involved = cache(partial(self._involved, rank))
        for part in self.parts:
            for flow, holders, takers in involved(part.pattern, part.pp):
                whole = flow.num_bytes < self._sent_whole
                turn = part.layer % len(holders) if whole else 0
                for share in _shares(holders, takers, self.host_of_rank, whole, turn):
                    taker = takers[share.engine]
                    if rank not in (None, share.giver, taker):
                        continue
                    if rectangles := _cut(flow.rectangles, share):
                        yield Transfer(
                            part=part,
                            giver=share.giver,
                            taker=taker,
                            engine=share.engine,
                            worker=flow.worker,
                            rectangles=tuple(_in_place(r, part) for r in rectangles),
                        )

    def _involved(
        self, rank: int | None, pattern: int, pp: int
    ) -> list[tuple[Flow, tuple[int, ...], tuple[int, ...]]]:
        """(flow, its givers, its takers) of a pattern on a stage, where ``rank`` is one of them."""
        found = []
        for flow in self.patterns[pattern]:
            holders, takers = self._holders(flow.mesh, flow.at, pp), self._takers_of[flow.worker]
            if rank is None or rank in holders or rank in takers:
                found.append((flow, holders, takers))
        return found

    def _find_holders(self, mesh: MeshName, at: Indices, pp: int) -> tuple[int, ...]:
        return self.train.holders(mesh, (*at, ("pp", pp)))

    @cached_property
    def _takers_of(self) -> tuple[tuple[int, ...], ...]:
        """Worker -> the ranks that receive for it, engine by engine."""
        return tuple(zip(*self.takers, strict=True))

    def engine_bytes(self) -> int:
        """Bytes that one engine computes with, over all its workers, without padding."""
        return sum(flow.num_bytes for part in self.parts for flow in self.patterns[part.pattern])


def _parts(shape: ModelShape, train: Layout) -> tuple[PartPlace, ...]:
    """Every part of the model; the stages take turns, so that all of them send at once."""
    kinds = list(shape.layers_by_kind)
    queues: list[list[PartPlace]] = [[] for _ in range(train.pipeline)]
    queues[0].append(PartPlace(pattern=-1, pp=0, chunk=0))
    for pp, chunk in train.stages():
        for local, layer in enumerate(train.layers(shape.num_layers, pp=pp, chunk=chunk)):
            pattern = kinds.index(shape.feed_forward[layer])
            place = PartPlace(pattern=pattern, pp=pp, chunk=chunk, local=local, layer=layer)
            queues[pp].append(place)
    last = PartPlace(pattern=-2, pp=train.pipeline - 1, chunk=train.virtual_pipeline - 1)
    queues[-1].append(last)
    turns = range(max(map(len, queues)))
    return tuple(queue[turn] for turn in turns for queue in queues if turn < len(queue))


@lru_cache(maxsize=8)
def _patterns(
    shape: ModelShape, train: Layout, cut: EngineCut, dtype: str, te_names: bool
) -> Mapping[int, tuple[Flow, ...]]:
    """Pattern -> its flows, from a model with one layer of each kind on one pipeline stage."""
    small = replace(shape, feed_forward=tuple(shape.layers_by_kind))
    stage = replace(train, pipeline=1, virtual_pipeline=1)
    needed, own = _needed(small, cut), hf_buffers(small)
    found: dict[int, dict[tuple[MeshName, Indices, int], list[Rectangle]]] = {}
    for param in distinct_shards(small, stage, pp=0, chunk=0, te_names=te_names):
        flows = found.setdefault(_pattern_of(param.name), {})
        at = tuple(index for index in param.at if index[0] != "pp")
        for piece in param.pieces:
            for worker, box in needed[piece.hf]:
                if (common := _common(piece, box)) is not None:
                    rectangle = Rectangle(param.name, common, own.get(piece.hf, dtype))
                    flows.setdefault((param.mesh, at, worker), []).append(rectangle)
    return {
        pattern: tuple(Flow(*key, tuple(rectangles)) for key, rectangles in flows.items())
        for pattern, flows in found.items()
    }


def _pattern_of(param: str) -> int:
    module, *rest = param.split(".")
    if module == "embedding":
        return -1
    return int(rest[1]) if module == "decoder" and rest[0] == "layers" else -2


def _in_place(rectangle: Rectangle, part: PartPlace) -> Rectangle:
    """The same rectangle of the part's own layer."""
    if part.pattern < 0:
        return rectangle
    was, piece = f"layers.{part.pattern}.", rectangle.piece
    return Rectangle(
        rectangle.param.replace(was, f"layers.{part.local}.", 1),
        replace(piece, hf=piece.hf.replace(was, f"layers.{part.layer}.", 1)),
        rectangle.dtype,
    )


def _needed(shape: ModelShape, cut: EngineCut) -> Mapping[str, tuple[tuple[int, Box], ...]]:
    """HF tensor -> the (worker, rectangle) that each worker's loaders read of it."""
    return {
        tensor.name: tuple(
            (worker, box)
            for worker in range(cut.tensor)
            if (box := _box(shape, cut, rule, number, tensor, expert, worker)) is not None
        )
        for rule in rules(shape)
        for layer, expert in product(rule.layers, range(rule.experts))
        for number, tensor in enumerate(rule.tensors(layer, expert))
    }


def _box(
    shape: ModelShape,
    cut: EngineCut,
    rule: ParamRule,
    number: int,
    tensor: HfTensor,
    expert: int,
    worker: int,
) -> Box | None:
    """The rectangle of ``tensor``, the rule's tensor of that ``number``, that a worker reads."""
    whole: Box = ((0,) * len(tensor.shape), tensor.shape)
    if rule.mesh == "expert" and cut.spread_experts:
        own = _divided(rule.experts, cut.tensor, "experts")
        return whole if expert // own == worker else None
    match rule.kind:
        case "replicated":
            return whole
        case "row":
            return _part_of(tensor, 1, worker, cut.tensor)
        case "gate_up":
            return _part_of(tensor, 0, worker, cut.tensor)
        case "qkv":
            groups = _groups(shape)
            if number == 0 or groups >= cut.tensor:
                _divided(groups if number else _heads(shape), cut.tensor, "heads")
                return _part_of(tensor, 0, worker, cut.tensor)
            # Several workers share the keys and values of a group.
            return _part_of(tensor, 0, worker // _divided(cut.tensor, groups, "workers"), groups)
        case "vocab":
            rows = tensor.shape[0]
            padded = -(-rows // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
            share = _divided(padded, cut.tensor, "padded vocabulary")
            first = min(rows, worker * share)
            count = min(rows, first + share) - first
            return ((first, 0), (count, *tensor.shape[1:])) if count else None


def _groups(shape: ModelShape) -> int:
    assert isinstance(shape.attention, GroupedQueryAttention)
    return shape.attention.groups


def _heads(shape: ModelShape) -> int:
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


def _part_of(tensor: HfTensor, dim: int, index: int, parts: int) -> Box:
    share = _divided(tensor.shape[dim], parts, f"rows or columns of {tensor.name}")
    start, extent = [0] * len(tensor.shape), list(tensor.shape)
    start[dim], extent[dim] = index * share, share
    return tuple(start), tuple(extent)


def _common(piece: Piece, box: Box) -> Piece | None:
    """What ``piece`` and ``box`` have in common."""
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
    whole: bool,
    turn: int,
) -> tuple[Share, ...]:
    """Who sends a flow to which engine.

    A taker that holds the shard sends it to itself. Holders of a host serve the other takers of
    that host, and all holders together serve the takers of all other hosts.
    """
    here = set(holders)
    of_host: dict[int, list[int]] = {}
    for rank in holders:
        of_host.setdefault(host_of_rank[rank], []).append(rank)
    found = [Share(t, engine, 0, 1, 1) for engine, t in enumerate(takers) if t in here]
    waiting: dict[int | None, list[int]] = {}
    for engine, taker in enumerate(takers):
        if taker not in here:
            host = host_of_rank[taker]
            waiting.setdefault(host if host in of_host else None, []).append(engine)
    for host, engines in waiting.items():
        givers = holders if host is None else of_host[host]
        found += _line(givers, engines, whole, turn)
    return tuple(found)


def _line(givers: Sequence[int], engines: Sequence[int], whole: bool, turn: int) -> Iterator[Share]:
    """The engines' needs one after the other as a line that the givers cut into equal parts; with
    ``whole`` no engine's need is cut, and ``turn`` moves the givers on."""
    givers_, engines_ = len(givers), len(engines)
    for i, engine in enumerate(engines):
        low, high = i * givers_, (i + 1) * givers_
        if whole:
            yield Share(givers[(low // engines_ + turn) % givers_], engine, 0, 1, 1)
            continue
        for giver in range(low // engines_, (high - 1) // engines_ + 1):
            begin = max(low, giver * engines_) - low
            end = min(high, (giver + 1) * engines_) - low
            yield Share(givers[giver], engine, begin, end, givers_)


def _cut(rectangles: Sequence[Rectangle], share: Share) -> list[Rectangle]:
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
