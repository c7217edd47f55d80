"""Megatron layer specs: Transformer Engine's where installed, ours in plain torch elsewhere."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from ctrl_megatron.models.layers import GatedMLP, RMSNorm, RotatedSelfAttention


class PackedCausalAttention(torch.nn.Module):
    """Causal attention inside each sequence of a packed micro-batch, by torch's fused kernel.

    Needs no attention mask and no (S x S) scores, and no flop is spent between sequences.
    """

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError("context parallelism needs Transformer Engine's attention")
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> torch.Tensor:
        """query (T, A, D), key and value (T, G, D), A a multiple of G; returns (T, A * D)."""
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        outputs = []
        for start, end in itertools.pairwise(bounds):
            # (T, A, D) -> (1, A, T, D)
            q, k, v = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outputs).flatten(1)


class ValueOutputLayer(MegatronModule):
    """From a hidden state to one number, in the place of a language model's vocabulary projection.

    Every tensor rank holds it whole. Under sequence parallelism each of them sees other tokens, so
    weight and bias are marked for Megatron to sum their gradients over the tensor ranks; without
    the mark the ranks' heads would drift apart.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        dtype = config.params_dtype
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        for param in (self.weight, self.bias):
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """hidden (..., H) in any float dtype -> ((..., 1) float32, None), as Megatron's layers."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float()), None


def has_transformer_engine() -> bool:
    """True where Transformer Engine is installed; it is never installed without CUDA."""
    return importlib.util.find_spec("transformer_engine") is not None


def block_spec(num_layers: int, *, qk_norm: bool) -> Any:
    """The spec of a stage with ``num_layers`` layers; the final norm stands on the last stage."""
    if has_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
    # Megatron annotates these slots more narrowly than what it builds from.
    norm: Any = RMSNorm
    core_attention: Any = PackedCausalAttention
    head_norm: Any = RMSNorm if qk_norm else None
    bias_dropout_add: Any = get_bias_dropout_add
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=core_attention,
        linear_proj=RowParallelLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    layer = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=ModuleSpec(
            module=RotatedSelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=attention,
        ),
        self_attn_bda=bias_dropout_add,
        pre_mlp_layernorm=norm,
        mlp=ModuleSpec(module=GatedMLP, submodules=mlp),
        mlp_bda=bias_dropout_add,
    )
    layers = [ModuleSpec(module=TransformerLayer, submodules=layer)] * num_layers
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)
