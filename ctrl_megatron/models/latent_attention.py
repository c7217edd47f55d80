"""Multi-latent attention (DeepSeek-V2, arXiv 2405.04434) over a packed micro-batch.

T tokens, A heads of this tensor rank, N plain and R rotated numbers of a head's query and key, V
numbers of its value, L numbers of the short vector from which keys and values are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from ctrl_megatron.models.layers import rotate
from ctrl_megatron.models.packed_layout import PackedLayoutParams


def _neighbours(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The pairs of an embedding that pairs every even number with the next one."""
    return x[..., 0::2], x[..., 1::2]


class _Assemble(torch.autograd.Function):
    """Queries and keys (T, A, N + R) with their last R numbers rotated, and values (T, A, V).

    From queries (T, A, N + R), plain keys and values (T, A, N + V), and rotated parts of keys
    (T, 1, R), which all heads share.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        mixed: torch.Tensor,
        shared: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        plain = query.shape[-1] - shared.shape[-1]
        turned, out, key = (torch.empty_like(x) for x in (shared, query, query))
        out[..., :plain], key[..., :plain] = query[..., :plain], mixed[..., :plain]
        rotate(_neighbours(out[..., plain:]), _neighbours(query[..., plain:]), cos, sin, 1)
        rotate(_neighbours(turned), _neighbours(shared), cos, sin, 1)
        key[..., plain:] = turned
        ctx.save_for_backward(cos, sin)
        ctx.plain = plain
        return out, key, mixed[..., plain:].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (query, key, value), (cos, sin), plain = grads, ctx.saved_tensors, ctx.plain
        turned = key[..., plain:].sum(dim=1, keepdim=True)
        to_query, to_shared = torch.empty_like(query), torch.empty_like(turned)
        to_query[..., :plain] = query[..., :plain]
        rotate(_neighbours(to_query[..., plain:]), _neighbours(query[..., plain:]), cos, sin, -1)
        rotate(_neighbours(to_shared), _neighbours(turned), cos, sin, -1)
        return to_query, torch.cat([key[..., :plain], value], dim=-1), to_shared, None, None


class LatentRotaryEmbedding(torch.nn.Module):
    """The rotation of packed tokens, in place of Megatron's for the positions of one sequence."""

    def __init__(self, inverse_frequencies: torch.Tensor, factor: float) -> None:
        """``inverse_frequencies`` (R / 2,) float32; ``factor`` multiplies what is rotated."""
        super().__init__()
        self._frequencies, self._factor = inverse_frequencies, factor

    def forward(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (T, 1, R / 2) times the factor, for (T,) int64 positions."""
        angles = torch.outer(positions.float(), self._frequencies.to(positions.device))[:, None]
        return (angles.cos() * self._factor).to(dtype), (angles.sin() * self._factor).to(dtype)


class LatentSelfAttention(MLASelfAttention):
    """Megatron's layer with positions of packed rows, and with whole gradients of the shared part
    of the keys on every tensor rank.

    The short vectors are computed on every tensor rank by whole weights, under sequence parallelism
    for its own tokens.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """The modules that the specification names. Megatron from 0.19 on would derive them from
        ``qk_layernorm``, which cannot say that only keys and values are normalised."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        return {name: getattr(submodules, name) for name in (*names, "q_layernorm", "kv_layernorm")}

    def get_query_key_value_tensors(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        key_value_states: None,
        position_ids: None,
        packed_seq_params: PackedLayoutParams,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """Query and key (T, A, N + R), value (T, A, V) of hidden states
        (T / sequence ranks, 1, H); Megatron's short vectors, which only other kinds of attention
        read, are None."""
        config: Any = self.config
        norm: Any
        if config.q_lora_rank is None:
            query, _no_bias = self.linear_q_proj(hidden_states)
        else:
            short, _no_bias = self.linear_q_down_proj(hidden_states)
            norm = self.q_layernorm
            query, _no_bias = self.linear_q_up_proj(norm(short))
        short, _no_bias = self.linear_kv_down_proj(hidden_states)
        short, shared = short.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        # Every tensor rank uses the shared part for its own heads alone, so the gradients add up.
        if config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, group=self.tp_group)
        else:
            shared = copy_to_tensor_model_parallel_region(shared, group=self.tp_group)
        norm = self.kv_layernorm
        mixed, _no_bias = self.linear_kv_up_proj(norm(short))
        tokens, heads = len(shared), self.num_attention_heads_per_partition
        tables = self.rotary_pos_emb(packed_seq_params.positions, config.params_dtype)
        parts = _Assemble.apply(
            query.view(tokens, heads, -1), mixed.view(tokens, heads, -1), shared, *tables
        )
        return *parts, None, None  # type: ignore[misc]
