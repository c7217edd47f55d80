"""One declarative table per Hugging Face family, read in both directions.

A rule names a Megatron parameter, the HF tensors that it consists of, and their order in it;
``models.shards`` turns rules into rectangles of a rank's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from ctrl_megatron.models.hf_config import ModelShape
from ctrl_megatron.parallel.layout import MeshName

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
    mesh: MeshName = "dense"
    """The mesh over whose tensor ranks the parameter is cut."""
    experts: int | None = None
    """The layer has so many of this parameter, spread over the expert ranks; then ``{e}`` is the
    expert: local in Megatron names, global in HF names."""


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
