"""From a model's shape and a parallel layout to Megatron model chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from ctrl_megatron.config.transformer_overrides import KEY, override_problems
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.adapters import add_adapters
from ctrl_megatron.models.grouped_experts import leave_counts_on_device
from ctrl_megatron.models.latent_attention import LatentRotaryEmbedding
from ctrl_megatron.models.layer_spec import (
    PackedRotaryEmbedding,
    ValueOutputLayer,
    block_spec,
    fuses_norms,
    has_transformer_engine,
    supports_gradient_accumulation_fusion,
)
from ctrl_megatron.models.rope import Rope, YarnScaling, rope_frequencies
from ctrl_megatron.models.router import take_keys
from ctrl_megatron.models.shape import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    GroupedQueryAttention,
    LayerKind,
    ModelShape,
    MultiLatentAttention,
)
from ctrl_megatron.models.shards import check_split, shard_params
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.parallel.layout import Layout
from ctrl_megatron.parallel.vocab import vocab_range

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How to build a model, beyond its shape and layout."""

    dtype: str = "bfloat16"
    recompute_granularity: str | None = None
    recompute_num_layers: int = 1
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Megatron's TransformerConfig (``config.transformer_overrides``)."""


def check_options(options: BuildOptions) -> None:
    """UserError for an unknown dtype, and for an override that may not be set."""
    if options.dtype not in DTYPES:
        raise UserError(f"dtype {options.dtype!r} is not supported; known: {', '.join(DTYPES)}")
    # A reference model has the actor's overrides and recomputes nothing.
    if problems := [*override_problems(options.overrides, "selective")]:
        raise UserError("\n".join(problems))


def transformer_config(
    shape: ModelShape, groups: ProcessGroups, options: BuildOptions
) -> TransformerConfig:
    """Megatron's configuration of the model; UserError for an override that may not be set."""
    check_options(options)
    layout, dtype = groups.layout, DTYPES[options.dtype]
    settings: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_epsilon,
        "layernorm_zero_centered_gamma": shape.zero_centred_norms,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        # Means "the activation of the layer spec": models.layers.SwiGLU without Transformer Engine.
        "use_te_activation_func": not has_transformer_engine(),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline
        if layout.virtual_pipeline > 1
        else None,
        "pipeline_model_parallel_layout": uneven_pipeline_layout(shape.num_layers, layout),
        # With two interleaved stages the next and the previous rank are the same one; Megatron
        # separates the two directions only if their messages are not batched.
        "overlap_p2p_comm": layout.virtual_pipeline > 1,
        "batch_p2p_comm": layout.virtual_pipeline == 1,
        "sequence_parallel": layout.sequence_parallel and layout.tensor > 1,
        # Micro-batches are packed to a token budget, so their lengths differ.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # the other one refuses lengths that differ
        # The loss is normalised already (models.loss_scale); Megatron must not divide again.
        "calculate_per_token_loss": True,
        "recompute_granularity": options.recompute_granularity,
        "perform_initialization": False,
        "gradient_accumulation_fusion": supports_gradient_accumulation_fusion(),
    }
    for kind in shape.layers_by_kind:
        settings |= _feed_forward_settings(kind)
    if options.recompute_granularity == "full":
        settings |= {
            "recompute_method": "uniform",
            "recompute_num_layers": options.recompute_num_layers,
        }
    if groups.device.type != "cuda":
        settings |= {
            "use_cpu_initialization": True,
            "deallocate_pipeline_outputs": False,
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
            "persist_layer_norm": False,
        }
    if groups.device.type == "cuda":
        # On a CPU a product for each expert takes the same time, without copies of the weights.
        settings["moe_grouped_gemm"] = True
    if groups.device.type == "cuda" and has_transformer_engine():
        settings |= {
            "moe_permute_fusion": True,
            "bias_dropout_fusion": True,
            "apply_rope_fusion": True,
            # Saves three fifths of the memory that an unfused SwiGLU keeps for its backward pass.
            "bias_activation_fusion": True,
        }
    latent = isinstance(shape.attention, MultiLatentAttention)
    if latent and options.overrides.get("apply_rope_fusion"):
        raise UserError(f"{KEY}.apply_rope_fusion has no effect on latent attention; remove it")
    kind, own = _attention_settings(shape.attention, shape.rope)
    return kind(**{**settings, **own, **options.overrides})


def _attention_settings(
    attention: Attention, rope: Rope
) -> tuple[type[TransformerConfig], dict[str, Any]]:
    """The class of Megatron's configuration and the fields that one kind of attention reads."""
    settings = {"num_attention_heads": attention.heads, "num_query_groups": attention.groups}
    match attention:
        case GroupedQueryAttention():
            # Rotated queries and keys times the factor have the same scores as a larger scale.
            scale = attention.head_dim**-0.5 * rope.attention_factor**2
            return TransformerConfig, settings | {
                "kv_channels": attention.head_dim,
                "softmax_scale": scale if rope.attention_factor != 1.0 else None,
                "add_qkv_bias": attention.qkv_bias,
                "qk_layernorm": attention.qk_norm,
                "attention_output_gate": attention.gated,
            }
        case MultiLatentAttention():
            scaled = {}
            if isinstance(rope.scaling, YarnScaling):
                # Megatron computes the factor of all scores from them.
                scaled["rotary_scaling_factor"] = rope.scaling.factor
                scaled["mscale_all_dim"] = rope.scaling.mscale_all_dim
            return MLATransformerConfig, settings | scaled | {
                "q_lora_rank": attention.q_lora_rank,
                "kv_lora_rank": attention.kv_lora_rank,
                "qk_head_dim": attention.qk_nope_head_dim,
                "qk_pos_emb_head_dim": attention.qk_rope_head_dim,
                "v_head_dim": attention.v_head_dim,
                "kv_channels": attention.qk_head_dim,
                # It would sum the norm's gradients over tensor ranks that have them whole.
                "qk_layernorm": False,
                # models.latent_attention rotates.
                "rope_type": "rope",
                "apply_rope_fusion": False,
            }


def uneven_pipeline_layout(num_layers: int, layout: Layout) -> list[list[str]] | None:
    """The modules of each virtual stage, in the order of the layers, by Megatron's names; None if
    all have as many layers, which Megatron assumes."""
    stages = [
        ["decoder"] * len(layout.layers(num_layers, pp=pp, chunk=chunk))
        for pp, chunk in layout.virtual_stages()
    ]
    if len({len(stage) for stage in stages}) == 1:
        return None
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def _feed_forward_settings(kind: FeedForward) -> dict[str, Any]:
    """The fields of Megatron's configuration that one kind of layer reads."""
    match kind:
        case Dense(width=width):
            return {"ffn_hidden_size": width}
        case Experts():
            return {
                "num_moe_experts": kind.count,
                "moe_ffn_hidden_size": kind.expert_width,
                "moe_router_topk": kind.top_k,
                "moe_router_score_function": kind.scores,
                # The softmax over the chosen experts equals the renormalised one over all.
                "moe_router_pre_softmax": not kind.renormalised,
                "moe_router_topk_scaling_factor": kind.scaling if kind.scaling != 1.0 else None,
                "moe_router_enable_expert_bias": kind.correction_bias,
                "moe_router_dtype": "fp32" if kind.wide_router else None,
                "moe_shared_expert_intermediate_size": kind.shared_width or None,
                "moe_shared_expert_gate": kind.shared_gate,
                "moe_router_load_balancing_type": "none",
            }


def build_chunks(shape: ModelShape, groups: ProcessGroups, options: BuildOptions) -> list[GPTModel]:
    """This rank's model chunks, one per virtual stage, on the device, weights uninitialised.

    A language model's forward pass returns hidden states after the final norm: the output layer
    and the softmax are computed together by ``parallel.vocab``, so the output layer returns its
    input. A value model's forward pass returns values.
    """
    layout = groups.layout
    layout.check_layers(shape.num_layers)
    check_split(shape, layout)
    config = transformer_config(shape, groups, options)
    padded = vocab_range(shape.vocab_size, 0, layout.tensor)[2] * layout.tensor
    chunks = []
    # Context ranks exchange tokens in attention (models.context_parallel), for which Megatron's own
    # layers see one sequence on one rank.
    within = copy(groups.megatron)
    within.cp = groups.alone
    for chunk in range(layout.virtual_pipeline):
        layers = layout.layers(shape.num_layers, pp=groups.place.pp, chunk=chunk)
        kinds = [shape.layer_kinds[layer] for layer in layers]
        model = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(kinds, fuse_norms=fuses_norms(shape)),
            vocab_size=padded,
            max_sequence_length=shape.max_position_embeddings,
            pre_process=layout.has_embedding(pp=groups.place.pp, chunk=chunk),
            post_process=layout.has_output_layer(pp=groups.place.pp, chunk=chunk),
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=int(shape.rope.theta),
            pg_collection=within,
            vp_stage=chunk if layout.virtual_pipeline > 1 else None,
        )
        _rotate_by_positions(model, shape)
        _prepare_experts(model, kinds)
        if model.post_process and shape.value_head:
            model.output_layer = ValueOutputLayer(config, bias=shape.head_bias)  # type: ignore[assignment]
        elif model.post_process:
            model.output_layer.forward = _pass_through  # type: ignore[method-assign]
        if shape.lora is not None:
            stage = {"chunk": chunk, "te_names": fuses_norms(shape)}
            params = shard_params(shape, layout, groups.place, **stage)
            add_adapters(model, shape.lora, {param.name: param for param in params})
        chunks.append(model.to(groups.device))
    # The routers have their biases by now, which models.router updates instead of Megatron.
    config.moe_router_enable_expert_bias = False
    return chunks


def _rotate_by_positions(model: GPTModel, shape: ModelShape) -> None:
    """Replace Megatron's rotary embedding, which knows one sequence."""
    frequencies = rope_frequencies(shape.rope, shape.attention.rotary_width)
    match shape.attention:
        case GroupedQueryAttention():
            model.rotary_pos_emb = PackedRotaryEmbedding(frequencies)  # type: ignore[assignment]
        case MultiLatentAttention():
            rotation = LatentRotaryEmbedding(frequencies, shape.rope.attention_factor)
            for layer in model.decoder.layers:
                layer.self_attention.rotary_pos_emb = rotation  # type: ignore[union-attr]


def _prepare_experts(model: GPTModel, kinds: Sequence[LayerKind]) -> None:
    """Tell the routers how their family groups its experts, let them know their tokens, and let
    grouped products have the numbers of tokens on the device."""
    for layer, kind in zip(model.decoder.layers, kinds, strict=True):
        if isinstance(kind.feed_forward, Experts):
            experts: Any = layer.mlp
            experts.router.choice.groups = kind.feed_forward.choice
            experts.register_forward_pre_hook(take_keys, with_kwargs=True)
            if model.config.moe_grouped_gemm:
                leave_counts_on_device(experts.token_dispatcher)


def _pass_through(
    hidden: torch.Tensor, weight: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, None]:
    return hidden, None


def output_weight(model: GPTModel) -> torch.Tensor:
    """The (padded vocabulary / tensor size, H) weight of the last stage's output layer."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    weight = model.output_layer.weight
    assert weight is not None
    return weight
