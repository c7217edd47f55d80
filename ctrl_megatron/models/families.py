"""One declarative table per Hugging Face family, read in both directions.

A rule names a Megatron parameter, the HF tensors that it consists of, and their order in it.
``pieces`` turns a rule into rectangles: these rows and columns of an HF tensor are at this place of
a rank's shard. Import copies them in one direction, export and resharding in the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.hf_config import ModelShape
from ctrl_megatron.parallel.layout import Layout
from ctrl_megatron.parallel.vocab import vocab_range

Kind = Literal["replicated", "row", "vocab", "qkv", "gate_up"]
Part = Literal["embedding", "layer", "final_norm", "output"]


@dataclass(frozen=True, slots=True)
class ParamRule:
    """One Megatron parameter. ``{i}`` is the layer: local in Megatron names, global in HF names."""

    part: Part
    """The pipeline stage with the parameter."""
    megatron: str
    """Name in the local layer spec."""
    hf: tuple[str, ...]
    kind: Kind
    te: str | None = None
    """Name in the Transformer Engine spec, if that fuses the norm into a linear layer."""


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


VALUE_HEAD = "score"
"""The name of the head in transformers' token classification models."""


def table(shape: ModelShape) -> tuple[ParamRule, ...]:
    """The rules of the model's family (Llama, Qwen2 and Qwen3 differ in biases and QK norms)."""

    def layer(
        megatron: str, kind: Kind, *hf: str, leaf: str = "weight", te: str | None = None
    ) -> ParamRule:
        return ParamRule(
            "layer",
            f"decoder.layers.{{i}}.{megatron}.{leaf}",
            tuple(f"model.layers.{{i}}.{name}.{leaf}" for name in hf),
            kind,
            te=te and f"decoder.layers.{{i}}.{te}.layer_norm_weight",
        )

    qkv, fc1 = "self_attention.linear_qkv", "mlp.linear_fc1"
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    embedding = ("model.embed_tokens.weight",)
    if shape.value_head:
        output = [
            ParamRule("output", f"output_layer.{leaf}", (f"{VALUE_HEAD}.{leaf}",), "replicated")
            for leaf in ("weight", "bias")
        ]
    else:
        vocabulary = embedding if shape.tied_embeddings else ("lm_head.weight",)
        output = [ParamRule("output", "output_layer.weight", vocabulary, "vocab")]
    return (
        ParamRule("embedding", "embedding.word_embeddings.weight", embedding, "vocab"),
        layer("input_layernorm", "replicated", "input_layernorm", te=qkv),
        layer(qkv, "qkv", *projections),
        *([layer(qkv, "qkv", *projections, leaf="bias")] if shape.qkv_bias else []),
        *(
            layer(f"self_attention.{x}_layernorm", "replicated", f"self_attn.{x}_norm")
            for x in ("qk" if shape.qk_norm else "")
        ),
        layer("self_attention.linear_proj", "row", "self_attn.o_proj"),
        layer("pre_mlp_layernorm", "replicated", "post_attention_layernorm", te=fc1),
        layer(fc1, "gate_up", "mlp.gate_proj", "mlp.up_proj"),
        layer("mlp.linear_fc2", "row", "mlp.down_proj"),
        ParamRule(
            "final_norm", "decoder.final_layernorm.weight", ("model.norm.weight",), "replicated"
        ),
        *output,
    )


def hf_shape(name: str, shape: ModelShape) -> tuple[int, ...]:
    """Full shape of the HF tensor ``name`` (``{i}`` filled in or not)."""
    hidden, ffn, head = shape.hidden_size, shape.ffn_hidden_size, shape.head_dim
    queries, keys = shape.num_attention_heads * head, shape.num_query_groups * head
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": ffn, "up_proj": ffn}
    owner, leaf = name.split(".")[-2:]
    if owner in ("embed_tokens", "lm_head"):
        return (shape.vocab_size, hidden)
    if owner == VALUE_HEAD:
        return (1,) if leaf == "bias" else (1, hidden)
    if owner in rows:
        return (rows[owner],) if leaf == "bias" else (rows[owner], hidden)
    if owner in ("o_proj", "down_proj"):
        return (hidden, queries if owner == "o_proj" else ffn)
    return (head,) if owner in ("q_norm", "k_norm") else (hidden,)


def hf_names(shape: ModelShape) -> tuple[str, ...]:
    """Every HF tensor of the model once, in checkpoint order."""
    ordered = []
    for part, rules in groupby(table(shape), key=lambda rule: rule.part):
        names = [name for rule in rules for name in rule.hf]
        layers = range(shape.num_layers if part == "layer" else 1)
        ordered += [name.format(i=i) for i in layers for name in names]
    return tuple(dict.fromkeys(ordered))


def check_tensor_size(shape: ModelShape, layout: Layout) -> None:
    """ValueError unless heads, query groups and ffn divide over the tensor ranks."""
    sizes = {
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "intermediate_size": shape.ffn_hidden_size,
    }
    for key, size in sizes.items():
        if size % layout.tensor:
            raise UserError(
                f"the model's {key}={size} does not divide over "
                f"tensor_model_parallel_size={layout.tensor}; choose a divisor of {size}"
            )


def pieces(rule: ParamRule, shape: ModelShape, *, layer: int, tp: int, tensor: int) -> ShardParam:
    """The part of ``rule`` for global ``layer`` on tensor rank ``tp`` of ``tensor``; its name keeps
    ``{i}``."""
    names = tuple(n.format(i=layer) for n in rule.hf)
    full = hf_shape(names[0], shape)
    tail = full[1:]
    if rule.kind == "replicated":
        placed, local = [_rows(names[0], 0, 0, full[0], tail)], full
    elif rule.kind == "row":
        local = (full[0], full[1] // tensor)
        start = (0, tp * local[1])
        placed = [Piece(hf=names[0], hf_start=start, start=(0, 0), extent=local)]
    elif rule.kind == "vocab":
        first, real, share = vocab_range(full[0], tp, tensor)
        local = (share, *tail)
        placed = [_rows(names[0], first, 0, real, tail)] if real else []
    else:
        # Megatron interleaves: queries, keys and values of query group 0, of group 1, ...; gate and
        # up projection of tensor rank 0, of rank 1, ...
        parts = shape.num_query_groups if rule.kind == "qkv" else tensor
        placed, row = [], 0
        for part in range(tp * parts // tensor, (tp + 1) * parts // tensor):
            for name in names:
                count = hf_shape(name, shape)[0] // parts
                placed.append(_rows(name, part * count, row, count, tail))
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
    for rule in table(shape):
        if rule.part == "layer":
            layers = list(enumerate(layout.layers(shape.num_layers, pp=pp, chunk=chunk)))
        else:
            layers = [(0, 0)] if held[rule.part] else []
        name = (rule.te or rule.megatron) if te_names else rule.megatron
        for local, layer in layers:
            param = pieces(rule, shape, layer=layer, tp=tp, tensor=layout.tensor)
            yield replace(param, name=name.format(i=local))
