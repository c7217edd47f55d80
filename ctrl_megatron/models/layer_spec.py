"""Megatron layer specs: Transformer Engine's if it is installed, else ours in plain torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import layers as tensor_layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention, transformer_block
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from ctrl_megatron.models.attention import PackedAttention, shared_prefix_attention_class
from ctrl_megatron.models.delta_net import DeltaNetMixer, DeltaNetSubmodules
from ctrl_megatron.models.grouped_experts import GroupedExperts
from ctrl_megatron.models.latent_attention import LatentSelfAttention
from ctrl_megatron.models.layers import RMSNorm, RotatedSelfAttention, SwiGLU
from ctrl_megatron.models.packed_layout import PackedLayoutParams
from ctrl_megatron.models.router import Router
from ctrl_megatron.models.shape import (
    AnyShape,
    Attention,
    Dense,
    Experts,
    FeedForward,
    GatedDeltaNet,
    GroupedQueryAttention,
    LayerKind,
    MultiLatentAttention,
)

if not hasattr(moe_utils, "te_general_gemm"):
    # Megatron's router reads this name of Transformer Engine's and accepts None, but defines it
    # only where Transformer Engine is installed.
    setattr(moe_utils, "te_general_gemm", None)  # noqa: B010 (an attribute that pyright misses)
if importlib.util.find_spec("transformer_engine") is None:
    # Megatron's stand-ins for the library's classes are no types, for which it looks here.
    multi_latent_attention.HAVE_TE = False
    # Megatron 0.19 compares with this class of its own, but imports it only with the library.
    multi_latent_attention.Linear = Linear


class PackedRotaryEmbedding(torch.nn.Module):
    """A rotary table with a row for every token of a packed micro-batch. It replaces Megatron's,
    whose rows are the positions of one sequence: here every response of a group continues from the
    position where their shared prompt ends.
    """

    def __init__(self, inverse_frequencies: torch.Tensor) -> None:
        super().__init__()
        self.inv_freq = inverse_frequencies

    def get_rotary_seq_len(
        self, _context: Any, _block: Any, _hidden: Any, _config: Any, packed: PackedLayoutParams
    ) -> torch.Tensor:
        """The (T,) int64 positions, which Megatron passes on to ``forward``."""
        return packed.positions

    def forward(self, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        """(T,) -> (T, 1, 1, D) float32 angles."""
        angles = torch.outer(positions.float(), self.inv_freq.to(positions.device))
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class ValueOutputLayer(MegatronModule):
    """From a hidden state to one number; it replaces a language model's vocabulary projection.

    Every tensor rank has the whole layer. Under sequence parallelism each of them computes other
    tokens, so weight and bias are marked for Megatron to sum their gradients over the tensor ranks;
    without the mark the ranks' heads would diverge.
    """

    def __init__(self, config: TransformerConfig, *, bias: bool = True) -> None:
        super().__init__(config)
        dtype = config.params_dtype
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype)) if bias else None
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """hidden (..., H) in any float dtype -> ((..., 1) float32, None), as in Megatron."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden.float(), self.weight.float(), bias), None


def has_transformer_engine() -> bool:
    """True if Transformer Engine is installed, which requires CUDA."""
    return importlib.util.find_spec("transformer_engine") is not None


def supports_gradient_accumulation_fusion() -> bool:
    """True if Megatron's own linear layers can add a weight's gradient to earlier ones: with Apex
    built with ``--cuda_ext``, and on a CPU (``parallel.weight_gradient``)."""
    return tensor_layers._grad_accum_fusion_available


def fuse_weight_gradients(models: Iterable[torch.nn.Module]) -> None:
    """Make Transformer Engine's linear layers, if there are any, add the gradients of weights to
    ``main_grad`` inside their products.

    ``TransformerConfig.gradient_accumulation_fusion`` would do the same, but Megatron's own output
    layer refuses it without Apex.
    """
    for model in models:
        for module in model.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def fuses_norms(shape: AnyShape) -> bool:
    """True if norms are inside the linear layers behind them: with Transformer Engine, unless
    adapters need those layers' own input."""
    return has_transformer_engine() and shape.lora is None


def block_spec(kinds: Sequence[LayerKind], *, fuse_norms: bool = True) -> Any:
    """The spec of a stage with these layers; the last stage has the final norm. ``fuse_norms`` is
    for Transformer Engine."""
    if has_transformer_engine():
        norm = transformer_block.LayerNormImpl
        layers = [_transformer_engine_layer(kind.mixer, kind.feed_forward) for kind in kinds]
        if not fuse_norms:
            for layer in layers:
                _take_norms_out(layer.submodules)
    else:
        norm = RMSNorm
        layers = [_layer(kind.mixer, kind.feed_forward) for kind in kinds]
    # Megatron's annotations of these fields are narrower than what it accepts.
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)  # type: ignore[arg-type]


def _layer(mixer: Attention | GatedDeltaNet, kind: FeedForward) -> ModuleSpec:
    """A layer in plain torch."""
    norm: Any = RMSNorm
    bias_dropout_add: Any = get_bias_dropout_add
    gated = MLPSubmodules(
        linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=SwiGLU
    )
    match kind:
        case Dense():
            mlp = ModuleSpec(module=MLP, submodules=gated)
        case Experts():
            experts = ModuleSpec(module=GroupedExperts, submodules=gated)
            shared = ModuleSpec(module=SharedExpertMLP, submodules=gated)
            parts: Any = MoESubmodules(experts=experts, shared_experts=shared, router=Router)
            mlp = ModuleSpec(module=MoELayer, submodules=parts)
    layer = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=_mixer(mixer),
        self_attn_bda=bias_dropout_add,
        pre_mlp_layernorm=norm,
        mlp=mlp,
        mlp_bda=bias_dropout_add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=layer)


def _mixer(mixer: Attention | GatedDeltaNet) -> ModuleSpec:
    core_attention: Any = PackedAttention
    norm: Any = RMSNorm
    match mixer:
        case GatedDeltaNet():
            return _delta_net(mixer, ColumnParallelLinear, RowParallelLinear)
        case GroupedQueryAttention():
            head_norm: Any = norm if mixer.qk_norm else None
            module: Any = RotatedSelfAttention
            parts: Any = SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=core_attention,
                linear_proj=RowParallelLinear,
                q_layernorm=head_norm,
                k_layernorm=head_norm,
            )
        case MultiLatentAttention():
            module, whole = LatentSelfAttention, Linear
            parts = MLASelfAttentionSubmodules(
                linear_q_proj=ColumnParallelLinear,
                linear_q_down_proj=whole,
                linear_q_up_proj=ColumnParallelLinear,
                linear_kv_down_proj=whole,
                linear_kv_up_proj=ColumnParallelLinear,
                core_attention=core_attention,
                linear_proj=RowParallelLinear,
                q_layernorm=norm,
                kv_layernorm=norm,
            )
    causal = {"attn_mask_type": AttnMaskType.causal}
    return ModuleSpec(module=module, params=causal, submodules=parts)


def _delta_net(net: GatedDeltaNet, column: Any, row: Any) -> ModuleSpec:
    parts = DeltaNetSubmodules(in_proj=column, out_proj=row)
    return ModuleSpec(module=DeltaNetMixer, params={"net": net}, submodules=parts)


def _transformer_engine_layer(mixer: Attention | GatedDeltaNet, kind: FeedForward) -> Any:
    latent = isinstance(mixer, MultiLatentAttention)
    spec: Any = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=kind.count if isinstance(kind, Experts) else None,
        moe_grouped_gemm=False,
        qk_layernorm=latent or (isinstance(mixer, GroupedQueryAttention) and mixer.qk_norm),
        multi_latent_attention=latent,
    )
    self_attention = spec.submodules.self_attention
    if isinstance(kind, Experts):
        parts = _parts_of(spec.submodules.mlp)
        parts.router, parts.experts.module = Router, GroupedExperts
    if isinstance(mixer, GatedDeltaNet):
        own = gpt_layer_specs.TESpecProvider()
        spec.submodules.input_layernorm = own.layer_norm()
        linear = own.column_parallel_linear(), own.row_parallel_linear()
        spec.submodules.self_attention = _delta_net(mixer, *linear)
        return spec
    self_attention.submodules.core_attention = shared_prefix_attention_class(
        self_attention.submodules.core_attention
    )
    if latent:
        self_attention.module = LatentSelfAttention
    elif isinstance(mixer, GroupedQueryAttention) and mixer.gated:
        # Megatron's own expects the gates of a group behind all its queries.
        self_attention.module = RotatedSelfAttention
    return spec


def _parts_of(feed_forward: Any) -> Any:
    """Megatron 0.19 has a function with arguments where 0.16 has a specification."""
    if isinstance(feed_forward, partial):
        return feed_forward.keywords["submodules"]
    return feed_forward.submodules


def _take_norms_out(layer: Any) -> None:
    """Replace the linear layers that begin with a norm by the norm and the linear layer."""
    parts = gpt_layer_specs.TESpecProvider()
    norm, column = parts.layer_norm(), parts.column_parallel_linear()
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    attention = layer.self_attention.submodules
    if isinstance(attention, DeltaNetSubmodules):
        pass  # it begins without one
    elif isinstance(attention, MLASelfAttentionSubmodules):
        attention.q_layernorm = attention.kv_layernorm = norm
        attention.linear_q_up_proj = attention.linear_kv_up_proj = column
    else:
        attention.linear_qkv = column
    feed_forward = _parts_of(layer.mlp)
    if hasattr(feed_forward, "linear_fc1"):
        feed_forward.linear_fc1 = column
