"""The shards of a model: which rectangles of Hugging Face tensors a rank's parameters consist of.

A rule of ``models.rules`` becomes rectangles: these rows and columns of an HF tensor are at this
place of a shard. Import copies them in one direction, export and resharding in the other. A rule
names its mesh, and its kind says which axes of the mesh cut it; all other axes replicate it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.rules import Kind, ParamRule, param_rules
from ctrl_megatron.models.shape import AnyShape, Experts, HfTensor, ModelShape
from ctrl_megatron.parallel.layout import Axis, Coordinates, Indices, Layout, MeshName
from ctrl_megatron.parallel.vocab import vocab_range


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangle of an HF tensor and its place in a rank's shard."""

    hf: str
    hf_start: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def hf_slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.hf_start, self.extent, strict=True))

    @property
    def shard_slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.extent, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDimension:
    """A dimension of a parameter that is split over the ranks of an axis."""

    dim: int
    axis: Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardParam:
    """One parameter of one shard with its pieces."""

    name: str
    shape: tuple[int, ...]
    """With as many dimensions as the HF tensors have: before the parameter's own is a 1 where they
    have all experts of a layer."""
    pieces: tuple[Piece, ...]
    cuts: tuple[SplitDimension, ...]
    mesh: MeshName
    at: Indices
    """The indices that distinguish this shard from the parameter's others; ``Layout.ranks_at`` of
    ``mesh`` and ``at`` are the ranks that have it."""
    copy: bool
    """Another parameter, in another shard, has the same HF tensor and is the one to save and
    send."""
    buffer: bool
    """The model has it as a buffer: neither gradient nor optimizer state belongs to it."""
    trained: bool
    """``ParamRule.trained``."""


def check_split(shape: ModelShape, layout: Layout) -> None:
    """UserError unless the model divides over the ranks of ``layout`` that split its layers."""
    experts = shape.expert_kinds
    if layout.ranks_per_expert_layer != layout.tensor and not experts:
        raise UserError(
            "the model has no experts for expert_model_parallel_size and "
            "expert_tensor_parallel_size to spread",
            remedy="leave both out",
        )
    if experts and layout.tensor > 1 and not layout.sequence_parallel:
        raise UserError(
            f"tensor_model_parallel_size={layout.tensor} splits a model with experts only together "
            "with sequence_parallel",
            remedy="set sequence_parallel to true",
        )
    tensor = ("tensor_model_parallel_size", layout.tensor)
    expert_tensor = ("expert_tensor_parallel_size", layout.expert_tensor_ranks)
    sizes = [(size, tensor) for size in shape.attention.divisible_sizes.items()]
    for kind in shape.layers_by_kind:
        ranks = expert_tensor if isinstance(kind, Experts) else tensor
        sizes += [(size, ranks) for size in kind.divisible_sizes.items()]
    sizes += [
        (("experts", k.count), ("expert_model_parallel_size", layout.expert)) for k in experts
    ]
    sizes += [
        (("n_shared_experts x moe_intermediate_size", k.shared_width), tensor) for k in experts
    ]
    if shape.delta_net is not None:
        spread = ("tensor_model_parallel_size x context_parallel_size", tensor[1] * layout.context)
        sizes += [(size, spread) for size in shape.delta_net.divisible_sizes.items()]
    for (what, size), (key, ranks) in sizes:
        if size % ranks:
            raise UserError(
                f"the model's {what}={size} does not divide over {key}={ranks}; choose a divisor "
                f"of {size}"
            )


def _axes(rule: ParamRule) -> tuple[Axis, ...]:
    if rule.kind == "shard":
        return ("shard",)
    split: Axis = "tp" if rule.mesh == "dense" else "etp"
    own: tuple[Axis, ...] = () if rule.kind == "replicated" else (split,)
    return (*own, "ep") if rule.mesh == "expert" else own


def _pieces(
    kind: Kind, tensors: Sequence[HfTensor], *, groups: int, index: int, parts: int
) -> tuple[tuple[int, ...], list[Piece]]:
    """(shape, pieces) of part ``index`` of ``parts`` of a parameter that consists of ``tensors``;
    ``groups`` are the model's query groups."""
    first, full = tensors[0].name, tensors[0].shape
    tail = full[1:]
    if kind == "row":
        local = (full[0], full[1] // parts)
        start = (0, index * local[1])
        return local, [Piece(hf=first, hf_start=start, start=(0, 0), extent=local)]
    if kind == "vocab":
        begin, real, share = vocab_range(full[0], index, parts)
        return (share, *tail), [_rows(first, begin, 0, real, tail)] if real else []
    if kind == "shard":
        most = -(-full[0] // parts)
        begin = min(index * most, full[0])
        count = min(most, full[0] - begin)
        return (count, *tail), [_rows(first, begin, 0, count, tail)] if count else []
    # Megatron interleaves: queries, keys and values of query group 0, of group 1, ...; gate and up
    # projection of tensor rank 0, of rank 1, ... A replicated parameter has one rank's part.
    blocks = groups if kind == "qkv" else parts
    placed, row = [], 0
    for block in range(index * blocks // parts, (index + 1) * blocks // parts):
        for whole in tensors:
            begin = 0
            for rows in whole.sections or whole.shape[:1]:
                count = rows // blocks
                placed.append(_rows(whole.name, begin + block * count, row, count, tail))
                row, begin = row + count, begin + rows
    return (row, *tail), placed


def _expert_pieces(
    kind: Kind, tensors: Sequence[HfTensor], *, expert: int, index: int, parts: int
) -> tuple[tuple[int, ...], list[Piece]]:
    """``_pieces`` of an expert's part of tensors that have all experts of a layer."""
    own = [replace(tensor, shape=tensor.shape[1:]) for tensor in tensors]
    size, placed = _pieces(kind, own, groups=0, index=index, parts=parts)
    return (1, *size), [
        Piece(
            hf=piece.hf,
            hf_start=(expert, *piece.hf_start),
            start=(0, *piece.start),
            extent=(1, *piece.extent),
        )
        for piece in placed
    ]


def _rows(name: str, hf_row: int, row: int, count: int, tail: tuple[int, ...]) -> Piece:
    zeros = (0,) * len(tail)
    return Piece(hf=name, hf_start=(hf_row, *zeros), start=(row, *zeros), extent=(count, *tail))


def shard_params(
    shape: AnyShape, layout: Layout, place: Coordinates, *, chunk: int, te_names: bool = False
) -> Iterator[ShardParam]:
    """Every parameter of virtual stage ``chunk`` of the rank at ``place``.

    With tied embeddings the output layer has no parameter on a stage that also has the embedding,
    and a copy of the embedding (the same HF tensor) on any other last stage.
    """
    return _stage(
        shape, layout, place.pp, chunk, te_names, lambda mesh, axes: (place.indices_on(*axes),)
    )


def distinct_shards(
    shape: AnyShape, layout: Layout, *, pp: int, chunk: int, te_names: bool = False
) -> Iterator[ShardParam]:
    """``shard_params`` of all ranks of a pipeline stage, each shard once however many have it."""
    return _stage(
        shape, layout, pp, chunk, te_names, lambda mesh, axes: layout.mesh(mesh).all_indices(axes)
    )


def _stage(
    shape: AnyShape,
    layout: Layout,
    pp: int,
    chunk: int,
    te_names: bool,
    indices: Callable[[MeshName, tuple[Axis, ...]], Iterable[Indices]],
) -> Iterator[ShardParam]:
    """The parameters of a virtual stage with each of the ``indices`` on the axes that cut them."""
    first = layout.has_embedding(pp=pp, chunk=chunk)
    last = layout.has_output_layer(pp=pp, chunk=chunk)
    held = {
        "embedding": first,
        "final_norm": last,
        "output": last and not (shape.tied_embeddings and first),
    }
    own = layout.layers(shape.num_layers, pp=pp, chunk=chunk)
    for rule in param_rules(shape):
        if rule.part == "layer":
            layers = [(k, layer) for k, layer in enumerate(own) if layer in rule.layers]
        else:
            layers = [(0, 0)] if held[rule.part] else []
        axes, sizes = _axes(rule), dict(layout.mesh(rule.mesh).sizes)
        name = (rule.te or rule.megatron) if te_names else rule.megatron
        copy = rule.part == "output" and shape.tied_embeddings
        for (local, layer), at in product(layers, indices(rule.mesh, axes)):
            for number, expert in _experts(rule, sizes, dict(at)):
                tensors = tuple(rule.tensors(layer, expert))
                index = next((index for axis, index in at if axis != "ep"), 0)
                parts = prod(sizes[axis] for axis in axes if axis != "ep")
                if rule.stacked:
                    size, placed = _expert_pieces(
                        rule.kind, tensors, expert=expert, index=index, parts=parts
                    )
                else:
                    groups = shape.attention.groups
                    size, placed = _pieces(
                        rule.kind, tensors, groups=groups, index=index, parts=parts
                    )
                yield ShardParam(
                    name=name.format(i=local, e=number),
                    shape=size,
                    pieces=tuple(placed),
                    cuts=tuple(
                        SplitDimension(dim=int(rule.kind == "row"), axis=a)
                        for a in axes
                        if a != "ep"
                    ),
                    mesh=rule.mesh,
                    at=(*at, ("pp", pp)),
                    copy=copy,
                    buffer=rule.buffer is not None,
                    trained=rule.trained,
                )


def _experts(
    rule: ParamRule, sizes: Mapping[Axis, int], at: Mapping[Axis, int]
) -> list[tuple[int, int]]:
    """(number on its rank, number in the layer) of the experts at these indices."""
    own = rule.experts // sizes.get("ep", 1)
    return list(enumerate(range(at.get("ep", 0) * own, (at.get("ep", 0) + 1) * own)))
