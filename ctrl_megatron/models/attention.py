"""Attention over a packed micro-batch whose segments may share a prefix (``packed_layout``).

Two ways to compute the same: by torch's fused kernel on CPUs, prefix and own part one after the
other, and by one variable-length call with the prefix's keys gathered for every segment: in
Transformer Engine where it is installed, else in torch's own flash attention.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import varlen

from ctrl_megatron.models.packed_layout import PackedLayout, PackedLayoutParams

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BLOCK = 128
"""Tokens whose gradients are computed together: their scores should fit a core's cache."""


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

    The backward pass makes the probabilities anew from the merged logarithms, so every part's share
    of the gradients is right by itself (as in ring attention, arXiv 2310.01889), no key is copied
    and nothing more is kept than without a prefix. It consists of products over all queries of a
    key: torch's own kernel, which goes head by head, takes up to twice as long for the few hundred
    tokens that segments have (``docs/experiments.md``).
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
        groups, dtype, wide = key.shape[1], query.dtype, log_sum.dtype
        shared_by = query.shape[1] // groups
        scale = query.shape[2] ** -0.5 if ctx.scale is None else ctx.scale

        def by_group(x: torch.Tensor) -> torch.Tensor:
            """(T, A, ...) -> (G, T * A / G, ...): all queries of a key are one matrix."""
            return x.unflatten(1, (groups, -1)).transpose(0, 1).flatten(1, 2)

        mean_grad = by_group((grads[0].to(wide) * out.to(wide)).sum(-1, keepdim=True))
        # Powers of two: torch's exp is three times slower where MKL computes it on an AMD.
        bits = scale * math.log2(math.e)
        log_sum = by_group(log_sum.unsqueeze(-1)) * math.log2(math.e)
        query, given, key, value = (by_group(x) for x in (query, grads[0], key, value))
        wide_query, wide_key = query.to(wide), key.to(wide)
        grad_query, grad_key, grad_value = (
            torch.zeros_like(x) for x in (wide_query, wide_key, wide_key)
        )
        for queries, blocks in _tiles(ctx.layout):
            rows = slice(queries.start * shared_by, queries.stop * shared_by)
            own_query, own_wide, own_given, own_sum, own_mean = (
                x[:, rows].contiguous() for x in (query, wide_query, given, log_sum, mean_grad)
            )
            for keys in blocks:
                probs = torch.baddbmm(own_sum, own_wide, wide_key[:, keys].mT, beta=-1, alpha=bits)
                probs.exp2_()
                if keys == queries:
                    later = torch.ones(probs.shape[2], probs.shape[2], dtype=torch.bool).triu_(1)
                    probs.unflatten(1, (-1, shared_by)).masked_fill_(later.unsqueeze(1), 0.0)
                grad_probs = torch.bmm(own_given, value[:, keys].mT)
                grad_scores = (grad_probs - own_mean).mul_(probs).to(dtype)
                grad_value[:, keys] += torch.bmm(probs.to(dtype).mT, own_given)
                grad_key[:, keys] += torch.bmm(grad_scores.mT, own_query)
                grad_query[:, rows] += torch.bmm(grad_scores, key[:, keys])

        def by_token(x: torch.Tensor) -> torch.Tensor:
            """Undoes ``by_group``."""
            tokens = ctx.layout.tokens
            return x.unflatten(1, (tokens, -1)).transpose(0, 1).flatten(1, 2).to(dtype)

        for_scores = (by_token(x.mul_(scale)) for x in (grad_query, grad_key))
        return *for_scores, by_token(grad_value), None, None


def _tiles(layout: PackedLayout) -> Iterator[tuple[slice, list[slice]]]:
    """Queries and the keys that they see; causally where they are the same tokens."""
    for segment in layout.segments:
        own = _blocks(segment.start, segment.end)
        yield from ((queries, own[: number + 1]) for number, queries in enumerate(own))
    for prefix, members in layout.families():
        seen = _blocks(prefix.start, prefix.stop)
        yield from ((queries, seen) for queries in _blocks(members.start, members.stop))


def _blocks(start: int, end: int) -> list[slice]:
    return [slice(at, min(at + _BLOCK, end)) for at in range(start, end, _BLOCK)]


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
