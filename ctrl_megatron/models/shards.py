"""The shards of a model: which rectangles of Hugging Face tensors a rank's parameters consist of.

``pieces`` turns a rule of ``models.rules`` into rectangles: these rows and columns of an HF
tensor are at this place of a rank's shard. Import copies them in one direction, export and
resharding in the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.rules import ParamRule, rules
from ctrl_megatron.models.shape import Experts, ModelShape
from ctrl_megatron.parallel.layout import Layout
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
        """Index of the rectangle in the HF tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.hf_start, self.extent, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the rectangle in the shard."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.extent, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardParam:
    """One parameter of one (tensor, pipeline, virtual) shard with its pieces."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    split_dim: int | None
    """The dimension that is split over tensor ranks; None if every rank has the whole parameter."""


def check_tensor_size(shape: ModelShape, layout: Layout) -> None:
    """UserError unless heads, query groups and widths divide over the tensor ranks."""
    if layout.tensor > 1 and any(isinstance(kind, Experts) for kind in shape.feed_forward):
        raise UserError(
            "a model with experts cannot be split over tensor ranks yet",
            remedy="set tensor_model_parallel_size to 1",
        )
    parts = (shape.attention, *shape.layers_by_kind)
    for key, size in ((key, size) for part in parts for key, size in part.split_sizes.items()):
        if size % layout.tensor:
            raise UserError(
                f"the model's {key}={size} does not divide over "
                f"tensor_model_parallel_size={layout.tensor}; choose a divisor of {size}"
            )


def pieces(
    rule: ParamRule, shape: ModelShape, *, layer: int, expert: int, tp: int, tensor: int
) -> ShardParam:
    """The part of ``rule`` for global ``layer`` and ``expert`` on tensor rank ``tp`` of ``tensor``;
    its name keeps ``{i}`` and ``{e}``."""
    tensors = list(rule.tensors(layer, expert))
    first, full = tensors[0].name, tensors[0].shape
    tail = full[1:]
    if rule.kind == "replicated":
        placed, local = [_rows(first, 0, 0, full[0], tail)], full
    elif rule.kind == "row":
        local = (full[0], full[1] // tensor)
        start = (0, tp * local[1])
        placed = [Piece(hf=first, hf_start=start, start=(0, 0), extent=local)]
    elif rule.kind == "vocab":
        begin, real, share = vocab_range(full[0], tp, tensor)
        local = (share, *tail)
        placed = [_rows(first, begin, 0, real, tail)] if real else []
    else:
        # Megatron interleaves: queries, keys and values of query group 0, of group 1, ...; gate and
        # up projection of tensor rank 0, of rank 1, ...
        parts = shape.attention.groups if rule.kind == "qkv" else tensor
        placed, row = [], 0
        for part in range(tp * parts // tensor, (tp + 1) * parts // tensor):
            for whole in tensors:
                count = whole.shape[0] // parts
                placed.append(_rows(whole.name, part * count, row, count, tail))
                row += count
        local = (row, *tail)
    split = {"replicated": None, "row": 1}.get(rule.kind, 0)
    return ShardParam(name=rule.megatron, shape=local, pieces=tuple(placed), split_dim=split)


def _rows(name: str, hf_row: int, row: int, count: int, tail: tuple[int, ...]) -> Piece:
    zeros = (0,) * len(tail)
    return Piece(hf=name, hf_start=(hf_row, *zeros), start=(row, *zeros), extent=(count, *tail))


def shard_params(
    shape: ModelShape, layout: Layout, *, tp: int, pp: int, chunk: int, te_names: bool = False
) -> Iterator[ShardParam]:
    """Every parameter of one shard of the model.

    With tied embeddings the output layer has no parameter on a stage that also has the embedding,
    and a copy of the embedding (the same HF tensor) on any other last stage.
    """
    first = layout.is_first(pp=pp, chunk=chunk)
    last = layout.is_last(pp=pp, chunk=chunk)
    held = {
        "embedding": first,
        "final_norm": last,
        "output": last and not (shape.tied_embeddings and first),
    }
    own = layout.layers(shape.num_layers, pp=pp, chunk=chunk)
    for rule in rules(shape):
        if rule.part == "layer":
            layers = [(k, layer) for k, layer in enumerate(own) if layer in rule.layers]
        else:
            layers = [(0, 0)] if held[rule.part] else []
        name = (rule.te or rule.megatron) if te_names else rule.megatron
        for (local, layer), expert in product(layers, range(rule.experts)):
            param = pieces(rule, shape, layer=layer, expert=expert, tp=tp, tensor=layout.tensor)
            yield replace(param, name=name.format(i=local, e=expert))
