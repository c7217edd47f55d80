"""The parameters of a model: one rule for each, read in both directions.

A rule names a Megatron parameter and the Hugging Face tensors that it consists of, with their full
shapes and their order in it; ``models.shards`` turns rules into rectangles of a rank's parameters,
``models.flops`` and ``memory`` count them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, product
from types import MappingProxyType
from typing import Literal

from ctrl_megatron.models.shape import (
    VALUE_HEAD,
    AnyShape,
    Attention,
    Dense,
    ExpertNames,
    Experts,
    FeedForward,
    GatedDeltaNet,
    GroupedQueryAttention,
    HfTensor,
    MultiLatentAttention,
    TransformersShape,
)
from ctrl_megatron.parallel.layout import MeshName
from ctrl_megatron.types import Lora

Kind = Literal["replicated", "row", "vocab", "qkv", "column", "shard"]
"""How the tensor ranks share a parameter: each has its part of the columns (``row``), or of the
rows of every tensor, one after the other (``column``) or by query group (``qkv``). The ranks of a
copy of whole modules share the rows of a ``shard`` parameter, of which the last may have fewer or
none."""
Part = Literal["embedding", "layer", "final_norm", "output"]


@dataclass(frozen=True, slots=True)
class ParamRule:
    """One Megatron parameter or buffer. ``{i}`` is the layer and ``{e}`` the expert: local in
    Megatron names, global in HF names."""

    part: Part
    """The pipeline stage with the parameter."""
    megatron: str
    """Name in the local layer spec."""
    hf: tuple[HfTensor, ...]
    kind: Kind
    te: str | None = None
    """Name in the Transformer Engine spec, if that fuses the norm into a linear layer."""
    layers: tuple[int, ...] = (0,)
    """The layers, counted over all stages, that have the parameter; (0,) outside layers."""
    mesh: MeshName = "dense"
    """The mesh over whose tensor ranks the parameter is cut; the expert mesh also spreads the
    experts over its expert ranks."""
    experts: int = 1
    """Number of experts of a layer, each with this parameter; 1 outside experts."""
    passed: int = 1
    """Number of these experts that a token passes."""
    buffer: str | None = None
    """The type of state that is no parameter, such as the bias by which a router balances experts;
    None for a parameter, which has the model's type."""
    trained: bool = True
    """False for a weight that stays as the model's directory has it: it has no gradient and no
    optimizer state, and no checkpoint has it."""

    @property
    def stacked(self) -> bool:
        """Whether each HF tensor has all experts of a layer, along its first dimension."""
        return self.experts > 1 and "{e}" not in self.hf[0].name

    def tensors(self, layer: int, expert: int = 0) -> Iterator[HfTensor]:
        for tensor in self.hf:
            yield replace(tensor, name=tensor.name.format(i=layer, e=expert))


ADAPTED = "base_model.model."
"""The beginning of the names of PEFT's tensors."""
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"
"""The ends of the names of adapters' matrices."""
_ADAPTER = ".adapter."
_ROUTING = (".router.weight", ".mlp.gate.weight", "shared_experts.gate_weight")


@lru_cache(maxsize=64)
def param_rules(shape: AnyShape) -> tuple[ParamRule, ...]:
    """Every parameter of the model, in the order of its forward pass."""
    if isinstance(shape, TransformersShape):
        base = tuple(_as_they_are(shape))
        return base if shape.lora is None else tuple(_with_adapters(base, shape.lora))
    hidden, vocabulary = shape.hidden_size, (shape.vocab_size, shape.hidden_size)
    embedding = HfTensor("model.embed_tokens.weight", vocabulary)
    norm = HfTensor("model.norm.weight", (hidden,))
    if shape.value_head:
        output = [
            ParamRule("output", "output_layer.weight", (_head("weight", 1, hidden),), "replicated"),
        ]
        if shape.head_bias:
            own = (_head("bias", 1),)
            output.append(ParamRule("output", "output_layer.bias", own, "replicated"))
    else:
        tensor = embedding if shape.tied_embeddings else HfTensor("lm_head.weight", vocabulary)
        output = [ParamRule("output", "output_layer.weight", (tensor,), "vocab")]
    base = (
        ParamRule("embedding", "embedding.word_embeddings.weight", (embedding,), "vocab"),
        *_attention(shape.attention, hidden, shape.attention_layers),
        *_delta_net(shape.delta_net, hidden, shape.delta_layers),
        *(
            rule
            for kind, layers in shape.layers_by_kind.items()
            for rule in _feed_forward(kind, hidden, layers)
        ),
        ParamRule("final_norm", "decoder.final_layernorm.weight", (norm,), "replicated"),
        *output,
    )
    base = tuple(replace(rule, hf=_in_files(rule.hf, shape.file_names)) for rule in base)
    return base if shape.lora is None else tuple(_with_adapters(base, shape.lora))


def _as_they_are(shape: TransformersShape) -> Iterator[ParamRule]:
    """The parameters of a module tree: each is one tensor, and the ranks of a copy share its
    rows."""
    before: Part = "embedding"
    for layer, tensor in shape.tensors:
        if layer is not None:
            before = "final_norm"
            layers, part = (layer,), "layer"
        else:
            layers, part = (0,), before
        own = _in_files((tensor,), shape.file_names)
        yield ParamRule(part, tensor.name, own, "shard", layers=layers, mesh="module")


def _in_files(
    tensors: tuple[HfTensor, ...], names: tuple[tuple[str, str], ...]
) -> tuple[HfTensor, ...]:
    return tuple(replace(tensor, name=family_tensor_name(tensor.name, names)) for tensor in tensors)


def family_tensor_name(name: str, names: Iterable[tuple[str, str]]) -> str:
    """The family's name of the tensor that Llama's files call ``name``. ``names`` are pairs
    (Llama's prefix, family's prefix); the first that fits counts."""
    return next((b + name.removeprefix(a) for a, b in names if name.startswith(a)), name)


def llama_tensor_name(name: str, names: Iterable[tuple[str, str]]) -> str:
    """The name in Llama's files of the tensor that the family's files call ``name``. ``names`` as
    for ``family_tensor_name``."""
    layer = re.search(r"\.(\d+)\.", name)
    general = name if layer is None else name.replace(layer[0], ".{i}.", 1)
    return family_tensor_name(general, [(b, a) for a, b in names]).format(i=layer and layer[1])


def _with_adapters(base: Iterable[ParamRule], lora: Lora) -> Iterator[ParamRule]:
    """``base``, of which only a value model's head is trained, and the adapters' A and B.

    A linear layer of Megatron's has one A and one B for all adapted projections in it. B is cut as
    the layer's output and A as its input, which is whole where ranks share rows.
    """
    for rule in base:
        yield replace(rule, trained=rule.hf[0].name.startswith(f"{VALUE_HEAD}."))
        module = rule.megatron.removesuffix(".weight")
        adapted = [t for t in rule.hf if _projection(rule, t) in lora.targets]
        if not adapted:
            continue
        named = [(t.shape, *adapter_names(t.name, lora)) for t in adapted]
        down = tuple(HfTensor(a, (lora.rank, width)) for (_, width), a, _ in named)
        up = tuple(
            HfTensor(b, (t.shape[0], lora.rank), t.sections)
            for t, (_, _, b) in zip(adapted, named, strict=True)
        )
        kinds: tuple[Kind, Kind] = ("replicated", rule.kind)
        if rule.kind == "row":
            kinds = ("row", "replicated")
        for leaf, hf, kind in (("down", down, kinds[0]), ("up", up, kinds[1])):
            own = replace(rule, megatron=f"{module}{_ADAPTER}{leaf}", hf=hf, kind=kind)
            if rule.experts > 1 and "{e}" not in hf[0].name:
                # Every rank has it, as the parameter of its first expert.
                first = own.megatron.replace("{e}", "0")
                own = replace(own, megatron=first, mesh="dense", experts=1)
            yield own


def _projection(rule: ParamRule, tensor: HfTensor) -> str | None:
    """The last part of the name of the linear layer with this weight; None for other tensors, and
    for routers and gates of experts, which adapters leave alone."""
    if rule.part != "layer" or len(tensor.shape) != 2 or rule.megatron.endswith(_ROUTING):
        return None
    return tensor.name.split(".")[-2]


def linear_layer_names(shape: AnyShape) -> tuple[str, ...]:
    """The linear layers of a decoder layer, by the last part of their names."""
    named = (_projection(rule, t) for rule in param_rules(shape.without_adapters) for t in rule.hf)
    return tuple(dict.fromkeys(name for name in named if name is not None))


def adapter_name(weight: str, matrix: Literal["A", "B"]) -> str:
    """PEFT's name of a matrix of the adapter of ``weight``."""
    return f"{ADAPTED}{weight.removesuffix('.weight')}.lora_{matrix}.weight"


_EXPERT = re.compile(r"\.experts\.(?:\d+|\{e\})\.")
_AT_OUTPUT = ("down_proj", "w2")
"""The projections at the output of an expert."""


def adapter_names(weight: str, lora: Lora) -> tuple[str, str]:
    """The names of A and B of the adapter of ``weight``: PEFT's, without the number of the expert
    for a matrix that the experts of a layer share."""
    names = [adapter_name(weight, "A"), adapter_name(weight, "B")]
    if lora.shared_outer and _EXPERT.search(weight):
        outer = int(weight.split(".")[-2] in _AT_OUTPUT)
        names[outer] = _EXPERT.sub(".experts.", names[outer])
    return names[0], names[1]


def adapted_module(megatron: str) -> str | None:
    """The linear layer of an adapter's parameter ``megatron``; None for other parameters."""
    module, found, _ = megatron.partition(_ADAPTER)
    return module if found else None


def _head(leaf: str, *shape: int) -> HfTensor:
    return HfTensor(f"{VALUE_HEAD}.{leaf}", shape)


def _layer_rule(
    layers: tuple[int, ...],
    megatron: str,
    kind: Kind,
    hf: Mapping[str, tuple[int, ...]],
    *,
    leaf: str = "weight",
    te: str | None = None,
) -> ParamRule:
    """``megatron`` and ``hf`` name modules of a layer, ``leaf`` their parameter; ``te`` is the
    linear layer into which Transformer Engine fuses the norm."""
    return ParamRule(
        "layer",
        f"decoder.layers.{{i}}.{megatron}.{leaf}",
        tuple(HfTensor(f"model.layers.{{i}}.{name}.{leaf}", size) for name, size in hf.items()),
        kind,
        te=te and f"decoder.layers.{{i}}.{te}.layer_norm_weight",
        layers=layers,
    )


def _attention(attention: Attention, hidden: int, layers: tuple[int, ...]) -> Iterator[ParamRule]:
    match attention:
        case GroupedQueryAttention():
            return _grouped_query(attention, hidden, layers)
        case MultiLatentAttention():
            return _latent(attention, hidden, layers)


def _grouped_query(
    attention: GroupedQueryAttention, hidden: int, layers: tuple[int, ...]
) -> Iterator[ParamRule]:
    qkv, module = "self_attention.linear_qkv", "self_attn"
    queries = attention.query_width * (2 if attention.gated else 1)
    rows = {"q": queries, "k": attention.key_width, "v": attention.key_width}
    norm = {"input_layernorm": (hidden,)}
    weights = {f"{module}.{x}_proj": (count, hidden) for x, count in rows.items()}
    yield _layer_rule(layers, "input_layernorm", "replicated", norm, te=qkv)
    yield _layer_rule(layers, qkv, "qkv", weights)
    if attention.qkv_bias:
        biases = {f"{module}.{x}_proj": (count,) for x, count in rows.items()}
        yield _layer_rule(layers, qkv, "qkv", biases, leaf="bias")
    for x in "qk" if attention.qk_norm else "":
        norm = {f"{module}.{x}_norm": (attention.head_dim,)}
        yield _layer_rule(layers, f"self_attention.{x}_layernorm", "replicated", norm)
    out = {f"{module}.o_proj": (hidden, attention.query_width)}
    yield _layer_rule(layers, "self_attention.linear_proj", "row", out)


def _delta_net(
    delta: GatedDeltaNet | None, hidden: int, layers: tuple[int, ...]
) -> Iterator[ParamRule]:
    """The heads are spread over the tensor ranks; the norm is that of any head."""
    if delta is None or not layers:
        return
    own, theirs = "self_attention", "linear_attn"
    values, width = delta.value_heads, delta.value_width
    if delta.by_head:
        projections = [
            HfTensor(f"{theirs}.in_proj_qkvz", (sum(delta.sections) + width, hidden)),
            HfTensor(f"{theirs}.in_proj_ba", (2 * values, hidden)),
        ]
    else:
        sizes = {"z": width, "b": values, "a": values}
        projections = [
            HfTensor(f"{theirs}.in_proj_qkv", (sum(delta.sections), hidden), delta.sections),
            *(HfTensor(f"{theirs}.in_proj_{x}", (size, hidden)) for x, size in sizes.items()),
        ]

    def rule(name: str, kind: Kind, *tensors: HfTensor, leaf: str = "weight") -> ParamRule:
        return ParamRule(
            "layer",
            f"decoder.layers.{{i}}.{own}{name}.{leaf}",
            tuple(replace(t, name=f"model.layers.{{i}}.{t.name}.{leaf}") for t in tensors),
            kind,
            layers=layers,
        )

    yield _layer_rule(layers, "input_layernorm", "replicated", {"input_layernorm": (hidden,)})
    yield rule(".in_proj", "column", *projections)
    convolution = (sum(delta.sections), 1, delta.kernel)
    yield rule(".conv1d", "column", HfTensor(f"{theirs}.conv1d", convolution, delta.sections))
    for leaf in ("dt_bias", "A_log"):
        yield rule("", "column", HfTensor(theirs, (values,)), leaf=leaf)
    yield rule(".norm", "replicated", HfTensor(f"{theirs}.norm", (delta.value_dim,)))
    yield rule(".out_proj", "row", HfTensor(f"{theirs}.out_proj", (hidden, width)))


def _latent(
    attention: MultiLatentAttention, hidden: int, layers: tuple[int, ...]
) -> Iterator[ParamRule]:
    """The short vectors are computed on every tensor rank, what follows from them by heads."""

    def rule(own: str, kind: Kind, theirs: str, *size: int, te: str | None = None) -> ParamRule:
        at = "self_attention."
        hf = {f"self_attn.{theirs}": size}
        return _layer_rule(layers, at + own, kind, hf, te=te and at + te)

    heads, rank, short = attention.heads, attention.q_lora_rank, attention.kv_lora_rank
    queries = heads * attention.qk_head_dim
    yield _layer_rule(layers, "input_layernorm", "replicated", {"input_layernorm": (hidden,)})
    if rank is None:
        yield rule("linear_q_proj", "column", "q_proj", queries, hidden)
    else:
        up = "linear_q_up_proj"
        yield rule("linear_q_down_proj", "replicated", "q_a_proj", rank, hidden)
        yield rule("q_layernorm", "replicated", "q_a_layernorm", rank, te=up)
        yield rule(up, "column", "q_b_proj", queries, rank)
    down, up = short + attention.qk_rope_head_dim, "linear_kv_up_proj"
    expanded = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    yield rule("linear_kv_down_proj", "replicated", "kv_a_proj_with_mqa", down, hidden)
    yield rule("kv_layernorm", "replicated", "kv_a_layernorm", short, te=up)
    yield rule(up, "column", "kv_b_proj", expanded, short)
    yield rule("linear_proj", "row", "o_proj", hidden, heads * attention.v_head_dim)


def _feed_forward(kind: FeedForward, hidden: int, layers: tuple[int, ...]) -> Iterator[ParamRule]:
    norm = {"post_attention_layernorm": (hidden,)}
    match kind:
        case Dense(width=width):
            fc1 = "mlp.linear_fc1"
            yield _layer_rule(layers, "pre_mlp_layernorm", "replicated", norm, te=fc1)
            yield from _gated(layers, "mlp", "mlp", ExpertNames(), hidden, width)
        case Experts(count=count, names=names):
            router = {f"{names.block}.gate": (count, hidden)}
            own, theirs = "mlp.experts.local_experts.{e}", f"{names.block}.experts"
            yield _layer_rule(layers, "pre_mlp_layernorm", "replicated", norm)
            yield _layer_rule(layers, "mlp.router", "replicated", router)
            if kind.correction_bias:
                bias = f"model.layers.{{i}}.{names.block}.gate.e_score_correction_bias"
                yield ParamRule(
                    "layer",
                    "decoder.layers.{i}.mlp.router.expert_bias",
                    (HfTensor(bias, (count,)),),
                    "replicated",
                    layers=layers,
                    buffer="float32",
                )
            if names.stacked:
                parts = _stacked(layers, own, theirs, kind, hidden)
            else:
                parts = _gated(layers, own, f"{theirs}.{{e}}", names, hidden, kind.expert_width)
            for rule in parts:
                yield replace(rule, mesh="expert", experts=count, passed=kind.top_k)
            if kind.shared_width:
                own, theirs = "mlp.shared_experts", f"{names.block}.{names.shared}"
                yield from _gated(layers, own, theirs, names, hidden, kind.shared_width)
            if kind.shared_gate:
                gate = {f"{names.block}.{names.shared}_gate": (1, hidden)}
                rule = _layer_rule(layers, own, "replicated", gate)
                yield replace(rule, megatron=f"decoder.layers.{{i}}.{own}.gate_weight")


def _gated(
    layers: tuple[int, ...], own: str, theirs: str, names: ExpertNames, hidden: int, width: int
) -> Iterator[ParamRule]:
    """The products of a gated feed-forward layer, which is called ``own`` here and ``theirs`` in
    Hugging Face's models."""
    halves = {f"{theirs}.{x}": (width, hidden) for x in (names.gate, names.up)}
    out = {f"{theirs}.{names.down}": (hidden, width)}
    yield _layer_rule(layers, f"{own}.linear_fc1", "column", halves)
    yield _layer_rule(layers, f"{own}.linear_fc2", "row", out)


def _stacked(
    layers: tuple[int, ...], own: str, theirs: str, kind: Experts, hidden: int
) -> Iterator[ParamRule]:
    """``_gated`` for each of the experts whose weights are in two tensors of a layer's file."""
    count, width, names = kind.count, kind.expert_width, kind.names
    halves = HfTensor(
        f"model.layers.{{i}}.{theirs}.gate_{names.up}", (count, 2 * width, hidden), (width, width)
    )
    out = HfTensor(f"model.layers.{{i}}.{theirs}.{names.down}", (count, hidden, width))
    at = f"decoder.layers.{{i}}.{own}"
    yield ParamRule("layer", f"{at}.linear_fc1.weight", (halves,), "column", layers=layers)
    yield ParamRule("layer", f"{at}.linear_fc2.weight", (out,), "row", layers=layers)


@lru_cache(maxsize=64)
def hf_buffer_dtypes(shape: AnyShape) -> Mapping[str, str]:
    """Name -> type of every HF tensor that keeps its own type, whatever the model's is."""
    return MappingProxyType(
        {
            tensor.name: rule.buffer
            for rule in param_rules(shape)
            if rule.buffer is not None
            for layer, expert in product(rule.layers, range(rule.experts))
            for tensor in rule.tensors(layer, expert)
        }
    )


@lru_cache(maxsize=64)
def trained_names(shape: AnyShape) -> frozenset[str]:
    """HF names of the tensors that are trained, of model and adapters."""
    return frozenset(
        tensor.name
        for rule in param_rules(shape)
        if rule.trained
        for layer, expert in product(rule.layers, range(rule.experts))
        for tensor in rule.tensors(layer, expert)
    )


@lru_cache(maxsize=64)
def hf_shapes(shape: AnyShape) -> Mapping[str, tuple[int, ...]]:
    """Name -> full shape of every HF tensor of model and adapters, in checkpoint order."""
    ordered: dict[str, tuple[int, ...]] = {}
    for part, group in groupby(param_rules(shape), key=lambda rule: rule.part):
        own = list(group)
        for layer in range(shape.num_layers if part == "layer" else 1):
            for rule in own:
                for expert in range(rule.experts if layer in rule.layers else 0):
                    ordered |= {t.name: t.shape for t in rule.tensors(layer, expert)}
    return MappingProxyType(ordered)
