"""The fields of Megatron's TransformerConfig that ``override_transformer_config`` may set.

Every field here changes only how a model is computed. All others are refused: they have no effect
on the models of this package, or they would contradict the layout, the memory plan or the
``config.json`` without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ctrl_megatron.errors import did_you_mean

KEY = "actor_rollout_ref.actor.megatron.override_transformer_config"
SWITCHES: Mapping[str, str] = {
    "apply_rope_fusion": "the rotary embedding in one kernel of Transformer Engine",
    "batch_p2p_sync": "waits after each exchange between pipeline stages",
    "bias_activation_fusion": "SwiGLU in one kernel",
    "bias_dropout_fusion": "the residual addition in one kernel",
    "clone_scatter_output_in_embedding": "frees the whole embedding under sequence parallelism",
    "deallocate_pipeline_outputs": "frees a stage's output after it is sent",
    "deterministic_mode": "only kernels of Transformer Engine that repeat their results",
    "disable_bf16_reduced_precision_matmul": "sums of bfloat16 products in float32",
    "gradient_accumulation_fusion": "a weight's gradient is added inside its matrix product",
    "moe_grouped_gemm": "grouped matrix products over a layer's experts; the default on GPUs",
    "moe_permute_fusion": "Transformer Engine's kernels move tokens to their experts",
    "use_te_activation_func": "false: Megatron's SwiGLU where Transformer Engine is not installed",
}
"""Fields with true or false, and what they do."""
RECOMPUTED = ("core_attn", "mlp")
"""The entries of ``recompute_modules`` that the memory plan counts."""
_MEGATRON, _COMPUTE = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.actor.compute"
_SAME = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "sequence_parallel"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "context_parallel_size"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
)
OURS: Mapping[str, str] = {
    **{name: f"{_MEGATRON}.{name}" for name in _SAME},
    **{name: f"{_COMPUTE}.{name}" for name in ("recompute_granularity", "recompute_num_layers")},
    **dict.fromkeys(
        ("params_dtype", "pipeline_dtype", "bf16", "fp16"), "actor_rollout_ref.model.dtype"
    ),
}
"""Fields that a key of ours sets."""
_SHAPE = "belongs to the model, whose config.json determines it"
_LAYOUT = "belongs to the layout, which other keys of actor_rollout_ref.actor.megatron determine"
_DROPOUT = "would let the log-probs of one text differ between two passes of the same weights"
_LOW_BITS = "needs kernels and weights of low precision, which the trainer lacks"
REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
            *("num_query_groups", "kv_channels", "normalization", "layernorm_epsilon"),
            *("layernorm_zero_centered_gamma", "add_bias_linear", "add_qkv_bias"),
            *("gated_linear_unit", "activation_func", "activation_func_clamp_value"),
            *("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq"),
            *("moe_router_enable_expert_bias", "moe_router_score_function"),
            *("qk_layernorm", "qk_l2_norm", "softmax_scale", "softmax_type", "window_size"),
            *("window_attn_skip_freq", "rotary_interleaved", "no_rope_freq", "mrope_section"),
            *("multi_latent_attention", "attention_output_gate", "mtp_num_layers"),
        ),
        _SHAPE,
    ),
    **dict.fromkeys(
        (
            *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
            "pipeline_model_parallel_layout",
            *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
            *("overlap_p2p_comm", "batch_p2p_comm", "variable_seq_lengths", "recompute_method"),
        ),
        _LAYOUT,
    ),
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), _DROPOUT),
    **dict.fromkeys(("fp8", "fp8_recipe", "fp8_param", "fp4", "fp4_recipe"), _LOW_BITS),
    "calculate_per_token_loss": "would normalise a loss that is normalised already",
}
"""Fields that have no key here, and why they may not be set."""


def override_problems(overrides: Mapping[str, Any], recompute: str | None) -> Iterator[str]:
    """A sentence for every field that may not be set or has a value of another type.

    ``recompute`` is ``recompute_granularity``, without which nothing reads ``recompute_modules``.
    """
    for name, value in overrides.items():
        if name in SWITCHES:
            if not isinstance(value, bool):
                yield f"{KEY}.{name}={value!r} must be true or false"
        elif name == "recompute_modules":
            yield from _modules(value, recompute)
        elif name in OURS:
            yield f"{KEY}.{name} is set by {OURS[name]}; use that key"
        elif name in REASONS:
            yield f"{KEY}.{name} {REASONS[name]}; remove it"
        else:
            allowed = (*SWITCHES, "recompute_modules")
            yield (
                f"{KEY}.{name} is no field that may be set, because it has no effect here or is "
                f"unknown to Megatron; known: {', '.join(allowed)}"
                f"{did_you_mean(name, (*allowed, *OURS, *REASONS))}"
            )


def _modules(value: Any, recompute: str | None) -> Iterator[str]:
    known = ", ".join(RECOMPUTED)
    if not isinstance(value, (list, tuple)) or not value:
        yield f"{KEY}.recompute_modules={value!r} must be a list of {known}"
    elif other := [module for module in value if module not in RECOMPUTED]:
        yield f"{KEY}.recompute_modules has {other[0]!r}; known: {known}"
    elif recompute != "selective":
        yield (
            f"{KEY}.recompute_modules is read only with {_COMPUTE}.recompute_granularity="
            "selective; set that or remove it"
        )
