"""The families of models: one object each, which says how a ``config.json`` becomes a shape.

The records of the shape decide everything else: ``models.rules`` has their parameters,
``models.layer_spec`` their layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ctrl_megatron.engine_kinds import EngineName
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.hf_keys import divides, whole
from ctrl_megatron.models.shape import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    GroupedQueryAttention,
    ModelShape,
)

HfConfig = Mapping[str, Any]
"""A ``config.json`` with the family's defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What distinguishes a ``model_type`` in its ``config.json``.

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


def _grouped_query(
    config: HfConfig, where: str, *, qkv_bias: bool, qk_norm: bool
) -> GroupedQueryAttention:
    """A null counts as a missing key, except for the two whose default follows from others."""
    heads = groups = whole(config, "num_attention_heads", where)
    hidden = whole(config, "hidden_size", where)
    if config.get("num_key_value_heads") is not None:
        groups = whole(config, "num_key_value_heads", where)
    divides(heads, "num_attention_heads", groups, "num_key_value_heads", where)
    if config.get("head_dim") is None:
        divides(hidden, "hidden_size", heads, "num_attention_heads", where)
        width = hidden // heads
    else:
        width = whole(config, "head_dim", where)
    return GroupedQueryAttention(
        heads=heads, groups=groups, head_dim=width, qkv_bias=qkv_bias, qk_norm=qk_norm
    )


def _qwen3_attention(config: HfConfig, where: str) -> GroupedQueryAttention:
    whole(config, "head_dim", where)  # its default is a number, so that a null has no meaning
    return _grouped_query(config, where, qkv_bias=False, qk_norm=True)


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
        top_k=whole(config, "num_experts_per_tok", where),
        renormalised=bool(config["norm_topk_prob"]),
    )
    if not 1 < experts.top_k <= experts.count:
        raise UserError(
            f"{where}: num_experts_per_tok={experts.top_k} is not supported, only 2 to "
            f"{counted}={experts.count}"
        )
    step, dense = whole(config, "decoder_sparse_step", where), config.get("mlp_only_layers") or ()
    sparse = [i for i in range(layers) if i not in dense and (i + 1) % step == 0]
    if len(sparse) == layers:
        return (experts,) * layers
    width = Dense(width=whole(config, "intermediate_size", where))
    return tuple(experts if i in sparse else width for i in range(layers))


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
                "mlp_only_layers",
                # They change a loss that is not computed here.
                *("output_router_logits", "router_aux_loss_coef"),
            ]
        ),
    ),
}
"""``model_type`` -> family."""


def unread_keys(shape: ModelShape, engine: EngineName) -> list[str]:
    """The keys of a model's ``config.json`` that ``engine`` ignores although they change the model
    (by the code of SGLang 0.5.23)."""
    if engine != "sglang" or shape.family != "qwen3_moe":
        return []
    changed = {
        "tie_word_embeddings": shape.tied_embeddings,
        "mlp_only_layers or decoder_sparse_step": len(shape.layers_by_kind) > 1,
    }
    return [key for key, has in changed.items() if has]
