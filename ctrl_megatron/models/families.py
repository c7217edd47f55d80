"""The families of models: one object each, which says how a ``config.json`` becomes a shape.

The records of the shape decide everything else: ``models.rules`` has their parameters,
``models.layer_spec`` their layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.hf_keys import divides, whole
from ctrl_megatron.models.shape import (
    Attention,
    Dense,
    ExpertNames,
    Experts,
    FeedForward,
    GroupedQueryAttention,
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
        top_k=_top_k(config, counted, where),
        renormalised=bool(config["norm_topk_prob"]),
    )
    step, dense = whole(config, "decoder_sparse_step", where), config.get("mlp_only_layers") or ()
    sparse = [i for i in range(layers) if i not in dense and (i + 1) % step == 0]
    if len(sparse) == layers:
        return (experts,) * layers
    width = Dense(width=whole(config, "intermediate_size", where))
    return tuple(experts if i in sparse else width for i in range(layers))


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


_ROUTER_LOSS = ("output_router_logits", "router_aux_loss_coef")
"""Keys that change a loss that is not computed here."""

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
}
"""``model_type`` -> family."""
