"""Attention over a packed micro-batch whose segments may share a prefix (``packed_layout``).

Two ways to compute the same: by torch's fused kernel on CPUs, prefix and own part one after the
other, and by one variable-length call with the prefix's keys gathered for every segment: in
Transformer Engine where it is installed, else in torch's own flash attention.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import varlen

from ctrl_megatron.models.packed_layout import PackedLayout, PackedLayoutParams

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class PackedCausalAttention(torch.nn.Module):
    """Attention in plain torch: no mask is needed, no (T x T) scores exist, and no flop is spent
    between tokens that do not see each other."""

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
        packed_seq_params: PackedLayoutParams,
        **_: Any,
    ) -> torch.Tensor:
        """query (T, A, D), key and value (T, G, D), A a multiple of G; returns (T, A * D)."""
        if query.device.type == "cpu":
            layout = packed_seq_params.layout
            out: Any = SegmentAttention.apply(query, key, value, layout, self.scale)
        elif query.dtype in (torch.bfloat16, torch.float16):
            out = variable_length_attention(query, key, value, packed_seq_params, self.scale)
        else:
            # Flash attention does not know float32.
            out = masked_attention(query, key, value, packed_seq_params.layout, self.scale)
        return out.flatten(1)


class SegmentAttention(torch.autograd.Function):
    """Causal attention inside every segment, merged with that of all its group's responses over
    their prefix by the logarithms of both softmaxes' denominators.

    The kernel's backward pass makes the probabilities anew from the logarithm it is given. Given
    the merged one, and the merged output, it returns each part's share of the gradients (as in
    ring attention, arXiv 2310.01889), so no key is copied and nothing more is kept than without
    a prefix.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        scale: float | None,
    ) -> torch.Tensor:
        """query (T, A, D), key and value (T, G, D); returns (T, A, D)."""
        out = query.new_empty(query.shape)
        wide = torch.promote_types(query.dtype, torch.float32)
        log_sum = query.new_empty(query.shape[:2], dtype=wide)

        def attend(queries: slice, keys: slice, *, causal: bool) -> tuple[Any, Any]:
            q, k, v = _batched(query[queries]), _batched(key[keys]), _batched(value[keys])
            return tuple(map(_flat, _forward(q, k, v, 0.0, causal, scale=scale)))

        for segment in layout.segments:
            own = slice(segment.start, segment.end)
            out[own], log_sum[own] = attend(own, own, causal=True)
        for prefix, members in layout.families():
            seen, log_seen = attend(members, prefix, causal=False)
            both = torch.logaddexp(log_sum[members], log_seen)
            share = (log_sum[members] - both).exp_().unsqueeze(-1)
            out[members] = torch.lerp(seen.to(wide), out[members].to(wide), share)
            log_sum[members] = both
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        grad_query, grad_key, grad_value = (x.new_empty(x.shape) for x in (query, key, value))

        def gradients(queries: slice, keys: slice, *, causal: bool) -> Any:
            q, given, found, logs = (_batched(x[queries]) for x in (query, grad_out, out, log_sum))
            k, v = _batched(key[keys]), _batched(value[keys])
            parts = _backward(given, q, k, v, found, logs, 0.0, causal, scale=ctx.scale)
            return map(_flat, parts)

        for segment in ctx.layout.segments:
            own = slice(segment.start, segment.end)
            grad_query[own], grad_key[own], grad_value[own] = gradients(own, own, causal=True)
        for prefix, members in ctx.layout.families():
            to_query, to_key, to_value = gradients(members, prefix, causal=False)
            grad_query[members] += to_query
            grad_key[prefix] += to_key
            grad_value[prefix] += to_value
        return grad_query, grad_key, grad_value, None, None


def _batched(x: torch.Tensor) -> torch.Tensor:
    """(n, A, ...) -> (1, A, n, ...)"""
    return x.transpose(0, 1).unsqueeze(0)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """(1, A, n, ...) -> (n, A, ...)"""
    return x.squeeze(0).transpose(0, 1)


def variable_length_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedLayoutParams,
    scale: float | None,
) -> torch.Tensor:
    """One call of torch's flash attention; shapes as in ``SegmentAttention``."""
    bounds = packed.attention
    return varlen.varlen_attn(  # type: ignore[return-value]
        query,
        _seen(key, packed),
        _seen(value, packed),
        bounds.cu_seqlens_q,
        bounds.cu_seqlens_kv,
        bounds.max_seqlen_q,
        bounds.max_seqlen_kv,
        scale=scale,
        # Causal; flash attention aligns at the bottom right where keys are more than queries.
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _seen(keys: torch.Tensor, packed: PackedLayoutParams) -> torch.Tensor:
    """What every segment sees, one segment after the other."""
    return keys if packed.key_index is None else keys.index_select(0, packed.key_index)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scale: float | None,
) -> torch.Tensor:
    """Segment by segment with a mask where there is a prefix; for any device and type."""
    outputs = []
    for segment in layout.segments:
        own, prefix = slice(segment.start, segment.end), segment.prefix
        shared = segment.prefix_end > segment.prefix_start
        mask = None
        if shared:
            mask = torch.ones(segment.queries, segment.keys, dtype=torch.bool, device=query.device)
            mask = mask.tril(segment.keys - segment.queries)
        k, v = (torch.cat([x[prefix], x[own]]) if shared else x[own] for x in (key, value))
        out = F.scaled_dot_product_attention(
            _batched(query[own]),
            _batched(k),
            _batched(v),
            attn_mask=mask,
            is_causal=not shared,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(_flat(out))
    return torch.cat(outputs)


class _TeMask(enum.Enum):
    """Masks of Transformer Engine that Megatron's ``AttnMaskType`` does not name."""

    padding_causal_bottom_right = 1


def over_shared_prefixes(kernel: Any) -> type:
    """Megatron's attention class ``kernel`` (``TEDotProductAttention``) for packed layouts."""

    class VariableLengthAttention(kernel):
        """One variable-length call of Transformer Engine."""

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            attn_mask_type: Any,
            attention_bias: torch.Tensor | None = None,
            packed_seq_params: Any = None,
        ) -> torch.Tensor:
            """query (T, A, D), key and value (T, G, D); returns (T, A * D)."""
            if packed_seq_params.key_index is not None:
                attn_mask_type = _TeMask.padding_causal_bottom_right
            return super().forward(
                query,
                _seen(key, packed_seq_params),
                _seen(value, packed_seq_params),
                attention_mask,
                attn_mask_type=attn_mask_type,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params.attention,
            )

    # Reports say whose kernel it is.
    VariableLengthAttention.__module__ = kernel.__module__
    VariableLengthAttention.__qualname__ = kernel.__qualname__
    return VariableLengthAttention
