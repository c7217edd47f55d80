"""The families of models: one object each, which says how a ``config.json`` becomes a shape.

The records of the shape decide everything else: ``models.rules`` has their parameters,
``models.layer_spec`` their layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import NoneType
from typing import Any

from ctrl_megatron.engine_kinds import ENGINES, EngineName
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.hf_keys import positive_int as whole
from ctrl_megatron.models.hf_keys import (
    positive_number,
    require_even_rotary_width,
    require_multiple,
)
from ctrl_megatron.models.rope import YarnScaling
from ctrl_megatron.models.shape import (
    CLASSIFIERS,
    Attention,
    Dense,
    ExpertNames,
    Experts,
    FeedForward,
    GatedDeltaNet,
    GroupedQueryAttention,
    GroupLimitedRouting,
    MaskedDiffusion,
    ModelShape,
    MultiLatentAttention,
)

HfConfig = Mapping[str, Any]
"""A ``config.json`` with the family's defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A ``model_type``: the keys of its ``config.json`` and the layers that they describe.

    Both functions take the configuration and the file's name for messages, and raise UserError.
    """

    attention: Callable[[HfConfig, str], Attention]
    feed_forward: Callable[[HfConfig, str], tuple[FeedForward, ...]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of transformers' configuration class for keys that a file may lack. Sizes of a
    particular model (layers, widths, vocabulary) are required."""
    keys: frozenset[str] = frozenset()
    """Keys beside those that all families have (``models.hf_config``)."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Key -> the values that are supported."""
    scalings: tuple[type, ...] = (object,)
    """Classes of the supported scalings of ``models.rope``."""
    architectures: tuple[str, ...] = ("ForCausalLM", *CLASSIFIERS)
    """The ends of the supported names under ``architectures``."""
    key_names: Mapping[str, str] = field(default_factory=dict)
    """Key of this family -> the key of the same meaning in Llama's files."""
    file_names: tuple[tuple[str, str], ...] = ()
    """As ``ModelShape.file_names``."""
    diffusion: Callable[[HfConfig, str], MaskedDiffusion] | None = None
    """None for a family of autoregressive models."""
    delta_net: Callable[[HfConfig, str], tuple[GatedDeltaNet, tuple[int, ...]]] | None = None
    """The gated delta net and the layers that have it; None for a family without."""
    zero_centred_norms: bool = False
    """As ``ModelShape.zero_centred_norms``."""
    inner: str = ""
    """The key under which the file of a model that reads more than text has the language model's
    keys; empty where they are the file's own."""
    stacked_experts: bool = False
    """As ``ExpertNames.stacked``."""
    layers_of: str = ""
    """The family of transformers with the same layers, where transformers lacks this one."""
    layer_types: tuple[str, ...] = ("full_attention",)
    """The supported kinds under ``layer_types``."""
    left_out: tuple[str, ...] = ()
    """Patterns of how the names of tensors begin with which no model here computes, such as those
    of pictures. Exports have them as they were."""


def _grouped_query(
    config: HfConfig, where: str, *, qkv_bias: bool, qk_norm: bool
) -> GroupedQueryAttention:
    """A null counts as a missing key, except for the two whose default follows from others."""
    heads = groups = whole(config, "num_attention_heads", where)
    hidden = whole(config, "hidden_size", where)
    if config.get("num_key_value_heads") is not None:
        groups = whole(config, "num_key_value_heads", where)
    require_multiple(heads, "num_attention_heads", groups, "num_key_value_heads", where)
    if config.get("head_dim") is None:
        require_multiple(hidden, "hidden_size", heads, "num_attention_heads", where)
        width = hidden // heads
    else:
        width = whole(config, "head_dim", where)
    require_even_rotary_width(width, where)
    return GroupedQueryAttention(
        heads=heads, groups=groups, head_dim=width, qkv_bias=qkv_bias, qk_norm=qk_norm
    )


def _qwen3_attention(config: HfConfig, where: str) -> GroupedQueryAttention:
    whole(config, "head_dim", where)  # its default is a number, so that a null has no meaning
    return _grouped_query(config, where, qkv_bias=False, qk_norm=True)


def _glm4_attention(config: HfConfig, where: str) -> GroupedQueryAttention:
    bias, norm = bool(config["attention_bias"]), bool(config["use_qk_norm"])
    return _partly_rotated(
        _grouped_query(config, where, qkv_bias=bias, qk_norm=norm), config, where
    )


def _partly_rotated(
    found: GroupedQueryAttention, config: HfConfig, where: str
) -> GroupedQueryAttention:
    """The first ``partial_rotary_factor`` of a head's numbers are rotated."""
    key = "partial_rotary_factor"
    given = {
        **config,
        **(config.get("rope_scaling") or {}),
        **(config.get("rope_parameters") or {}),
    }
    rotated = int(found.head_dim * positive_number(given, key, where))
    if not 0 < rotated <= found.head_dim:
        raise UserError(f"{where}: {key}={given[key]!r} must be at most 1")
    require_even_rotary_width(rotated, where)
    return replace(found, rotated=None if rotated == found.head_dim else rotated)


def _gated_attention(config: HfConfig, where: str) -> GroupedQueryAttention:
    found = _grouped_query(config, where, qkv_bias=False, qk_norm=True)
    return _partly_rotated(replace(found, gated=True), config, where)


def _delta_net(
    config: HfConfig, where: str, *, by_head: bool
) -> tuple[GatedDeltaNet, tuple[int, ...]]:
    """In all layers but every ``full_attention_interval``-th, unless ``layer_types`` has others."""
    net = GatedDeltaNet(
        key_heads=whole(config, "linear_num_key_heads", where),
        value_heads=whole(config, "linear_num_value_heads", where),
        key_dim=whole(config, "linear_key_head_dim", where),
        value_dim=whole(config, "linear_value_head_dim", where),
        kernel=whole(config, "linear_conv_kernel_dim", where),
        by_head=by_head,
    )
    sizes = (net.value_heads, "linear_num_value_heads", net.key_heads, "linear_num_key_heads")
    require_multiple(*sizes, where)
    count, step = whole(config, "num_hidden_layers", where), "full_attention_interval"
    kinds = config.get("layer_types")
    if not kinds:
        period = whole(config, step, where)
        return net, tuple(n for n in range(count) if (n + 1) % period)
    if len(kinds) != count:
        raise UserError(f"{where}: layer_types has {len(kinds)} entries for {count} layers")
    return net, tuple(n for n, kind in enumerate(kinds) if kind == "linear_attention")


def _dense(config: HfConfig, where: str) -> tuple[Dense, ...]:
    width = whole(config, "intermediate_size", where)
    return (Dense(width=width),) * whole(config, "num_hidden_layers", where)


def _qwen3_moe(config: HfConfig, where: str) -> tuple[FeedForward, ...]:
    """Experts in every ``decoder_sparse_step``-th layer that is not in ``mlp_only_layers``."""
    layers = whole(config, "num_hidden_layers", where)
    # transformers 5 writes the second name.
    counted = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    experts = Experts(
        count=whole(config, counted, where),
        expert_width=whole(config, "moe_intermediate_size", where),
        top_k=_top_k(config, counted, where),
        renormalised=bool(config["norm_topk_prob"]),
    )
    step, dense = whole(config, "decoder_sparse_step", where), config.get("mlp_only_layers") or ()
    sparse = [i for i in range(layers) if i not in dense and (i + 1) % step == 0]
    if len(sparse) == layers:
        return (experts,) * layers
    width = Dense(width=whole(config, "intermediate_size", where))
    return tuple(experts if i in sparse else width for i in range(layers))


def _with_gated_expert(config: HfConfig, where: str, *, stacked: bool) -> tuple[FeedForward, ...]:
    """``_qwen3_moe`` with an expert that every token passes, times a gate."""
    names = ExpertNames(shared="shared_expert", stacked=stacked)
    width = whole(config, "shared_expert_intermediate_size", where)
    return tuple(
        replace(kind, names=names, shared_width=width, shared_gate=True)
        if isinstance(kind, Experts)
        else kind
        for kind in _qwen3_moe(config, where)
    )


def _top_k(config: HfConfig, counted: str, where: str) -> int:
    """Experts for each token, of as many as the key ``counted`` says."""
    chosen, count = whole(config, "num_experts_per_tok", where), whole(config, counted, where)
    if not 1 < chosen <= count:
        raise UserError(
            f"{where}: num_experts_per_tok={chosen} is not supported, only 2 to {counted}={count}"
        )
    return chosen


_MIXTRAL = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def _mixtral(config: HfConfig, where: str) -> tuple[FeedForward, ...]:
    experts = Experts(
        count=whole(config, "num_local_experts", where),
        expert_width=whole(config, "intermediate_size", where),
        top_k=_top_k(config, "num_local_experts", where),
        renormalised=True,
        names=_MIXTRAL,
    )
    return (experts,) * whole(config, "num_hidden_layers", where)


def _latent(config: HfConfig, where: str) -> MultiLatentAttention:
    heads = whole(config, "num_attention_heads", where)
    if config.get("num_key_value_heads") not in (None, heads):
        raise UserError(
            f"{where}: num_key_value_heads={config['num_key_value_heads']} is not supported, only "
            f"num_attention_heads={heads}: every head has its own keys"
        )
    if "q_lora_rank" not in config:
        raise UserError(f"{where}: the key 'q_lora_rank' is missing; it may be null")
    rank = None if config["q_lora_rank"] is None else whole(config, "q_lora_rank", where)
    require_even_rotary_width(whole(config, "qk_rope_head_dim", where), where)
    return MultiLatentAttention(
        heads=heads,
        q_lora_rank=rank,
        kv_lora_rank=whole(config, "kv_lora_rank", where),
        qk_nope_head_dim=whole(config, "qk_nope_head_dim", where),
        qk_rope_head_dim=whole(config, "qk_rope_head_dim", where),
        v_head_dim=whole(config, "v_head_dim", where),
    )


def _sparse_latent(config: HfConfig, where: str) -> MultiLatentAttention:
    whole(config, "q_lora_rank", where)  # the indexer reads the queries' short vectors
    return replace(_latent(config, where), index_topk=whole(config, "index_topk", where))


def _deepseek(config: HfConfig, where: str, *, experts: Experts) -> tuple[FeedForward, ...]:
    """``experts`` in all layers but the first ones."""
    layers, dense = whole(config, "num_hidden_layers", where), config["first_k_dense_replace"]
    if not isinstance(dense, int) or dense < 0:
        raise UserError(f"{where}: first_k_dense_replace={dense!r} must be a whole number")
    first = min(dense, layers)
    plain = (Dense(width=whole(config, "intermediate_size", where)),) * first if first else ()
    return plain + (experts,) * (layers - first)


def _deepseek_experts(config: HfConfig, where: str, **own: Any) -> Experts:
    width = whole(config, "moe_intermediate_size", where)
    return Experts(
        count=whole(config, "n_routed_experts", where),
        expert_width=width,
        top_k=_top_k(config, "n_routed_experts", where),
        scaling=float(positive_number(config, "routed_scaling_factor", where)),
        shared_width=width * whole(config, "n_shared_experts", where),
        wide_router=True,
        **own,
    )


def _group_choice(config: HfConfig, where: str, *, best: int) -> GroupLimitedRouting | None:
    groups, chosen = (whole(config, key, where) for key in ("n_group", "topk_group"))
    count, top_k = config["n_routed_experts"], config["num_experts_per_tok"]
    require_multiple(count, "n_routed_experts", groups, "n_group", where)
    if chosen > groups or top_k > chosen * (count // groups) or best > count // groups:
        raise UserError(
            f"{where}: topk_group={chosen} of n_group={groups} groups have no "
            f"num_experts_per_tok={top_k} of n_routed_experts={count} experts to choose"
        )
    return (
        None if groups == chosen else GroupLimitedRouting(groups=groups, chosen=chosen, best=best)
    )


def _deepseek_v2(config: HfConfig, where: str) -> tuple[FeedForward, ...]:
    limited = config["topk_method"] == "group_limited_greedy"
    experts = _deepseek_experts(config, where, renormalised=False)
    choice = _group_choice(config, where, best=1) if limited else None
    return _deepseek(config, where, experts=replace(experts, choice=choice))


def _deepseek_v3(config: HfConfig, where: str) -> tuple[FeedForward, ...]:
    experts = _deepseek_experts(
        config, where, renormalised=True, scores="sigmoid", correction_bias=True
    )
    choice = _group_choice(config, where, best=2)
    return _deepseek(config, where, experts=replace(experts, choice=choice))


def _deepseek_v32(config: HfConfig, where: str) -> tuple[FeedForward, ...]:
    layers, key = _deepseek_v3(config, where), "mlp_layer_types"
    kinds = ["dense" if isinstance(kind, Dense) else "sparse" for kind in layers]
    if config.get(key) not in (None, kinds):
        raise UserError(
            f"{where}: {key}={config[key]!r} is not supported, only first_k_dense_replace="
            f"{config['first_k_dense_replace']} times 'dense' before 'sparse'"
        )
    return layers


_DEEPSEEK_KEYS = frozenset(
    [
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
        *("n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob"),
        *("routed_scaling_factor", "first_k_dense_replace", "moe_layer_freq", "rope_interleave"),
        # They follow from others.
        *("qk_head_dim", "ep_size"),
        # The code of published directories is that of transformers' own class.
        "auto_map",
        # They change a loss that is not computed here.
        *("aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef"),
    ]
)
_DEEPSEEK_ONLY: Mapping[str, tuple[Any, ...]] = {
    # transformers' norms of the short vectors have this constant, vLLM's that of the file.
    "rms_norm_eps": (None, 1e-6),
    "moe_layer_freq": (None, 1),
    "rope_interleave": (None, True),
}
_DEEPSEEK_V3 = Family(
    attention=_latent,
    feed_forward=_deepseek_v3,
    defaults={
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    },
    keys=_DEEPSEEK_KEYS | {"num_nextn_predict_layers"},
    only={
        **_DEEPSEEK_ONLY,
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
        "norm_topk_prob": (None, True),
    },
    scalings=(NoneType, YarnScaling),
)


def _masked_diffusion(config: HfConfig, where: str, *, shifted: bool) -> MaskedDiffusion:
    token, rows = config.get("mask_token_id"), whole(config, "vocab_size", where)
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < rows:
        raise UserError(
            f"{where}: mask_token_id={token!r} must be the number of a token, 0 to {rows - 1}"
        )
    if config.get("embedding_size") not in (None, rows):
        raise UserError(
            f"{where}: embedding_size={config['embedding_size']} is not supported, only "
            f"vocab_size={rows}"
        )
    return MaskedDiffusion(mask_token=token, shifted=shifted)


_LLADA_KEYS: Mapping[str, str] = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "activation_type": "hidden_act",
    "weight_tying": "tie_word_embeddings",
    "include_qkv_bias": "attention_bias",
    "include_bias": "mlp_bias",
}
_LLADA_BLOCK = "model.transformer.blocks.{i}."
_LLADA_NAMES = (
    ("model.embed_tokens.", "model.transformer.wte."),
    *(
        (f"model.layers.{{i}}.{ours}.", f"{_LLADA_BLOCK}{theirs}.")
        for ours, theirs in {
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "q_proj",
            "self_attn.k_proj": "k_proj",
            "self_attn.v_proj": "v_proj",
            "self_attn.o_proj": "attn_out",
            "post_attention_layernorm": "ff_norm",
            "mlp.gate_proj": "ff_proj",
            "mlp.up_proj": "up_proj",
            "mlp.down_proj": "ff_out",
        }.items()
    ),
    ("model.norm.", "model.transformer.ln_f."),
    ("lm_head.", "model.transformer.ff_out."),
)

_ROUTER_LOSS = ("output_router_logits", "router_aux_loss_coef")
"""Keys that change a loss that is not computed here."""

_QWEN3_5_KEYS = frozenset(
    [
        # They describe layers that predict further tokens.
        *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
        # What they say is so in every model that transformers computes.
        *("attn_output_gate", "output_gate_type", "mamba_ssm_dtype"),
    ]
)
_DELTA_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN3_NEXT = Family(
    attention=_gated_attention,
    feed_forward=partial(_with_gated_expert, stacked=False),
    delta_net=partial(_delta_net, by_head=True),
    zero_centred_norms=True,
    defaults={
        **_DELTA_DEFAULTS,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    keys=frozenset(
        [
            *(_DELTA_DEFAULTS.keys() - {"max_position_embeddings", "head_dim"}),
            *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
            *("shared_expert_intermediate_size", "norm_topk_prob", "decoder_sparse_step"),
            *("mlp_only_layers", *_ROUTER_LOSS),
        ]
    ),
    scalings=(NoneType,),
    layer_types=("linear_attention", "full_attention"),
    left_out=(r"mtp\.",),
)
_QWEN3_5_MOE = replace(
    _QWEN3_NEXT,
    feed_forward=partial(_with_gated_expert, stacked=True),
    delta_net=partial(_delta_net, by_head=False),
    stacked_experts=True,
    defaults={**_QWEN3_NEXT.defaults, "num_experts_per_tok": 8, "num_experts": 256},
    keys=(_QWEN3_NEXT.keys - {"norm_topk_prob", "decoder_sparse_step"}) | _QWEN3_5_KEYS,
    only={
        "mlp_only_layers": (None, []),
        "attn_output_gate": (None, True),
        "output_gate_type": (None, "silu", "swish"),
        "mamba_ssm_dtype": (None, "float32"),
    },
)
_QWEN3_5 = replace(
    _QWEN3_5_MOE,
    feed_forward=_dense,
    stacked_experts=False,
    defaults={**_DELTA_DEFAULTS, "num_key_value_heads": 4},
    keys=frozenset(_DELTA_DEFAULTS.keys() - {"max_position_embeddings", "head_dim"})
    | _QWEN3_5_KEYS,
)
_READS_PICTURES: Mapping[str, Any] = {
    "inner": "text_config",
    "architectures": ("ForConditionalGeneration", "ForCausalLM", *CLASSIFIERS),
    "file_names": (("model.", "model.language_model."),),
    "left_out": (r"mtp\.", r"model\.visual\."),
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        attention=partial(_grouped_query, qkv_bias=False, qk_norm=False),
        feed_forward=_dense,
        defaults={"max_position_embeddings": 2048},
        only={"sliding_window": (False, 0, None)},
    ),
    "qwen2": Family(
        attention=partial(_grouped_query, qkv_bias=True, qk_norm=False),
        feed_forward=_dense,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32},
    ),
    "qwen3": Family(
        attention=_qwen3_attention,
        feed_forward=_dense,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    ),
    "qwen3_moe": Family(
        attention=partial(_grouped_query, qkv_bias=False, qk_norm=True),
        feed_forward=_qwen3_moe,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
        },
        keys=frozenset(
            [
                *("num_experts", "num_local_experts", "moe_intermediate_size"),
                *("num_experts_per_tok", "norm_topk_prob", "decoder_sparse_step"),
                *("mlp_only_layers", *_ROUTER_LOSS),
            ]
        ),
    ),
    "mixtral": Family(
        attention=partial(_grouped_query, qkv_bias=False, qk_norm=False),
        feed_forward=_mixtral,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        keys=frozenset(
            [*("num_local_experts", "num_experts_per_tok", "router_jitter_noise"), *_ROUTER_LOSS]
        ),
        only={"sliding_window": (None,), "router_jitter_noise": (None, 0, 0.0)},
    ),
    "deepseek_v2": Family(
        attention=_latent,
        feed_forward=_deepseek_v2,
        defaults={
            "max_position_embeddings": 2048,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
        },
        keys=_DEEPSEEK_KEYS,
        only={
            **_DEEPSEEK_ONLY,
            "scoring_func": (None, "softmax"),
            "topk_method": (None, "greedy", "group_limited_greedy"),
            "norm_topk_prob": (None, False),  # transformers does not read it
        },
        scalings=(NoneType, YarnScaling),
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": replace(
        _DEEPSEEK_V3,
        attention=_sparse_latent,
        feed_forward=_deepseek_v32,
        defaults={
            **_DEEPSEEK_V3.defaults,
            "max_position_embeddings": 163840,
            "n_shared_experts": 1,
            "index_topk": 2048,
        },
        keys=_DEEPSEEK_V3.keys
        | {"index_topk", "index_n_heads", "index_head_dim", "mlp_layer_types"},
        # transformers 5.17 writes the first.
        layer_types=("deepseek_sparse_attention", "indexed_attention"),
        left_out=(r"model\.layers\.\d+\.self_attn\.indexer\.",),
    ),
    "glm4_moe": Family(
        attention=_glm4_attention,
        feed_forward=_deepseek_v3,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "attention_bias": False,
            "use_qk_norm": False,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
        },
        keys=frozenset(
            [
                *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group"),
                *("moe_intermediate_size", "topk_group", "norm_topk_prob", "first_k_dense_replace"),
                *("routed_scaling_factor", "num_nextn_predict_layers", "use_qk_norm"),
                *("partial_rotary_factor", "attention_bias", *_ROUTER_LOSS),
            ]
        ),
        only={"norm_topk_prob": (None, True)},
        scalings=(NoneType,),
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_5": replace(_QWEN3_5, **_READS_PICTURES),
    "qwen3_5_moe": replace(_QWEN3_5_MOE, **_READS_PICTURES),
    "Dream": Family(
        attention=partial(_grouped_query, qkv_bias=True, qk_norm=False),
        feed_forward=_dense,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32},
        keys=frozenset(["mask_token_id", "auto_map"]),
        architectures=("DreamModel",),
        diffusion=partial(_masked_diffusion, shifted=True),
        layers_of="qwen2",
    ),
    "llada": Family(
        attention=partial(_grouped_query, qkv_bias=False, qk_norm=False),
        feed_forward=_dense,
        defaults={"rms_norm_eps": 1e-5},
        keys=frozenset(
            [
                *("mask_token_id", "embedding_size", "auto_map"),
                # They follow from others, or concern initialisation and training.
                *("mlp_ratio", "multi_query_attention", "alibi_bias_max", "block_group_size"),
                *("init_device", "init_fn", "init_std", "init_cutoff_factor", "precision"),
                *("flash_attention", "embedding_dropout", "residual_dropout"),
                *("rope_full_precision", "layer_norm_with_affine"),
                *("attention_layer_norm_with_affine", "block_type", "layer_norm_type", "rope"),
            ]
        ),
        only={
            "tie_word_embeddings": (None, False),
            "rope": (None, True),
            "block_type": ("llama",),
            "layer_norm_type": ("rms",),
            "layer_norm_with_affine": (None, True),
            "rope_full_precision": (None, True),
            "embedding_dropout": (None, 0, 0.0),
            "residual_dropout": (None, 0, 0.0),
            "multi_query_attention": (None, False),
            "block_group_size": (None, 1),
        },
        architectures=("LLaDAModelLM",),
        key_names=_LLADA_KEYS,
        file_names=_LLADA_NAMES,
        diffusion=partial(_masked_diffusion, shifted=False),
        layers_of="llama",
    ),
}
"""``model_type`` -> family."""


_OUTER = frozenset(
    [
        *("text_config", "vision_config", "architectures", "model_type", "dtype", "torch_dtype"),
        *("transformers_version", "tie_word_embeddings", "image_token_id", "video_token_id"),
        *("vision_start_token_id", "vision_end_token_id", "id2label", "label2id"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"),
    ]
)
"""The keys of a model that reads pictures beside those of its language model."""


def language_model_keys(config: HfConfig, family: Family, where: str) -> dict[str, Any]:
    """The mapping of the language model within that of one that reads more than text. UserError
    for keys beside it that are not known."""
    inner = config.get(family.inner)
    if not isinstance(inner, dict):
        raise UserError(f"{where}: the object {family.inner!r} is missing")
    for key in sorted(key for key in config.keys() - _OUTER if config[key]):
        raise UserError(f"{where}: {key}={config[key]!r} is not supported beside {family.inner}")
    tied = [bool(own.get("tie_word_embeddings", False)) for own in (config, inner)]
    if tied[0] != tied[1]:
        raise UserError(f"{where}: tie_word_embeddings differs from that of {family.inner}")
    kept = {key: config[key] for key in _SHARED_KEYS & config.keys()}
    return {"model_type": config["model_type"], **inner, **kept}


_SHARED_KEYS = frozenset(["architectures", "id2label", "label2id", "quantization_config"])
"""Keys that a file has outside of its language model's."""


def left_out_names(config: HfConfig, where: str) -> re.Pattern[str]:
    """How the names of tensors begin that a directory with this ``config.json`` may have and that
    no model here has: those of layers that predict further tokens (multi-token prediction), and
    those that the family leaves out."""
    family = FAMILIES.get(config.get("model_type", ""))
    patterns = (*_further_layers(config, where), *(family.left_out if family else ()))
    return re.compile("|".join(patterns) or "(?!)")


def kept_names(config: HfConfig, where: str) -> re.Pattern[str]:
    """How the names of those begin that exports have all the same: that the family leaves out."""
    family = FAMILIES.get(config.get("model_type", ""))
    further = "|".join(_further_layers(config, where)) or "(?!)"
    return re.compile(f"(?!{further})(?:{'|'.join(family.left_out if family else ()) or '(?!)'})")


def _further_layers(config: HfConfig, where: str) -> list[str]:
    further = config.get(key := "num_nextn_predict_layers") or 0
    if not isinstance(further, int) or further < 0:
        raise UserError(f"{where}: {key}={further!r} must be a whole number")
    first = whole(config, "num_hidden_layers", where) if further else 0
    return [rf"model\.layers\.{first + i}\." for i in range(further)]


def engine_mismatch_reason(shape: ModelShape, engine: EngineName) -> str | None:
    """Why ``engine`` would compute another model than the trainer, with a remedy; None if it
    computes the same."""
    own, denoises, attention = ENGINES[engine], shape.diffusion is not None, shape.attention
    alike = {name: kind for name, kind in ENGINES.items() if kind.denoises == denoises}
    if engine not in alike:
        able = " or ".join(alike)
        return f"engine {engine!r} does not generate with the {shape.family} family; use {able}"
    matters = {
        "tie_word_embeddings": shape.tied_embeddings,
        "mlp_only_layers or decoder_sparse_step": len(shape.layers_by_kind) > 1,
        "head_dim": isinstance(attention, GroupedQueryAttention)
        and attention.heads * attention.head_dim != shape.hidden_size,
        # Without it attention is in every fourth layer.
        "layer_types": shape.delta_layers
        != tuple(n for n in range(shape.num_layers) if (n + 1) % 4),
        "text_config alone": True,
    }
    if keys := [key for key in own.unread.get(shape.family, ()) if matters[key]]:
        able = " or ".join(name for name, kind in alike.items() if shape.family not in kind.unread)
        return f"{own.title} does not read {' and '.join(keys)}; use {able}"
    return None


def cpu_delta_net_obstacle(net: GatedDeltaNet, engine: EngineName, dtype: str) -> str | None:
    """Why ``engine`` cannot compute this layer on a CPU in this dtype, with a remedy; None if it
    can."""
    own = ENGINES[engine]
    if (sizes := own.cpu_delta_heads) is None:
        return None
    here = f"{own.title} computes gated delta nets on a CPU"
    if not sizes:
        return f"no published build of {here}; use hf"
    if not {net.key_dim, net.value_dim} <= set(sizes):
        return (
            f"{here} with heads of {' or '.join(map(str, sizes))} numbers only, not with "
            f"linear_key_head_dim={net.key_dim} and linear_value_head_dim={net.value_dim}; use hf"
        )
    if dtype != "bfloat16":
        return f"{here} in bfloat16 only, not in {dtype}; use hf, or that dtype for the engine"
    return None
