"""Attention over a packed micro-batch whose segments may share a prefix (``packed_layout``).

Two ways to compute the same: segment by segment on CPUs, and by one variable-length call with the
prefix's keys gathered for every segment: in Transformer Engine where it is installed, else in
torch's own flash attention.
"""

from __future__ import annotations

import enum
import math
from itertools import pairwise, starmap
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import varlen

from ctrl_megatron.models.packed_layout import PackedLayout, PackedLayoutParams, Segment

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_MASKED = 512
"""Most queries under one mask: half of what it hides of them is computed for nothing."""
_SCORES = 400_000
"""Scores of all heads that are computed together in a backward pass, to fit a core's cache, unless
that were scores of fewer than ``_FEWEST`` tokens: products want long matrices."""
_FEWEST = 128


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
    """Attention segment by segment, over the keys of prefix and segment in one piece.

    Forwards by torch's fused kernel. Backwards by products of some queries with all keys that they
    see, whose probabilities are made anew from the kept logarithms of their sums: torch's own
    kernel goes head by head and takes up to twice as long (``docs/experiments.md``).
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
        mask = _Mask(layout, query)
        for segment in layout.segments:
            prefix = segment.keys - segment.queries
            keys, values = (_seen_by(segment, x) for x in (key, value))
            # Without a prefix torch's own mask is right, and spares what it hides.
            for piece in _pieces(segment, _MASKED if prefix else segment.queries):
                seen = prefix + piece.stop
                rows = slice(segment.start + piece.start, segment.start + piece.stop)
                hidden = mask(piece.stop - piece.start, seen) if prefix else None
                q, k, v = map(_batched, (query[rows], keys[:seen], values[:seen]))
                found = _forward(q, k, v, 0.0, not prefix, attn_mask=hidden, scale=scale)
                out[rows], log_sum[rows] = map(_flat, found)
        ctx.save_for_backward(query, key, value, log_sum)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, log_sum = ctx.saved_tensors
        (given,), layout = grads, ctx.layout
        heads, width, groups, wide = *query.shape[1:], key.shape[1], log_sum.dtype
        scale = width**-0.5 if ctx.scale is None else ctx.scale
        # Powers of two: torch's exp is three times slower where MKL computes it on an AMD.
        bits = scale * math.log2(math.e)
        log_sum = (log_sum * math.log2(math.e)).unsqueeze(-1)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(key, dtype=wide) for _ in range(2))
        scratch = _Scratch(layout, query, wide)

        def by_group(x: torch.Tensor) -> torch.Tensor:
            """(n, A, ...) -> (G, A / G * n, ...): all queries of a key are one matrix."""
            return x.transpose(0, 1).reshape(groups, -1, *x.shape[2:])

        for segment in layout.segments:
            prefix = segment.keys - segment.queries
            keys, values = (_seen_by(segment, x).transpose(0, 1).contiguous() for x in (key, value))
            wide_keys = keys.to(wide)
            grad_keys, grad_values = (torch.zeros_like(wide_keys) for _ in range(2))
            for piece in _pieces(segment, _at_once(segment, heads)):
                count, seen = piece.stop - piece.start, prefix + piece.stop
                rows = slice(segment.start + piece.start, segment.start + piece.stop)
                q, g, log = (by_group(x[rows]) for x in (query, given, log_sum))
                probs, grad, low_probs, low_grad = scratch.matrices(groups, q.shape[1], seen)
                torch.baddbmm(
                    log, q.to(wide), wide_keys[:, :seen].mT, beta=-1, alpha=bits, out=probs
                )
                # Zeros take the place also of what has become infinite for a later token.
                probs.exp2_().view(heads, count, seen).tril_(seen - count)
                # dS = P (dP - sum(P dP)), with dP in the inputs' type as in torch's kernel.
                grad.copy_(torch.bmm(g, values[:, :seen].mT, out=low_grad)).mul_(probs)
                grad.addcmul_(probs, grad.sum(-1, keepdim=True), value=-1)
                low_probs.copy_(probs)
                low_grad.copy_(grad)
                grad_values[:, :seen] += torch.bmm(low_probs.mT, g)
                grad_keys[:, :seen] += torch.bmm(low_grad.mT, q)
                products = torch.bmm(low_grad, keys[:, :seen])
                grad_query[rows] = products.view(heads, count, width).transpose(0, 1)
            for whole, own in ((grad_key, grad_keys), (grad_value, grad_values)):
                whole[segment.prefix] += own[:, :prefix].transpose(0, 1)
                whole[segment.start : segment.end] += own[:, prefix:].transpose(0, 1)
        dtype = query.dtype
        return (
            grad_query.mul_(scale),
            grad_key.mul_(scale).to(dtype),
            grad_value.to(dtype),
            None,
            None,
        )


class _Mask:
    """Causal masks aligned at the bottom right: zeros, and behind them a triangle of -inf. All are
    cut out of the largest one."""

    def __init__(self, layout: PackedLayout, like: torch.Tensor) -> None:
        masked = [segment for segment in layout.segments if segment.keys > segment.queries]
        queries = min(_MASKED, max((segment.queries for segment in masked), default=0))
        self._before = max((segment.keys for segment in masked), default=0)
        self._whole = like.new_zeros((queries, self._before + queries))
        self._whole[:, self._before :].fill_(-torch.inf).triu_(1)

    def __call__(self, queries: int, keys: int) -> torch.Tensor:
        """(queries, keys)"""
        return self._whole[:queries, self._before - (keys - queries) : self._before + queries]


class _Scratch:
    """Memory that stays in the cache from one piece of a backward pass to the next."""

    def __init__(self, layout: PackedLayout, query: torch.Tensor, wide: torch.dtype) -> None:
        heads = query.shape[1]
        most = heads * max(
            (piece.stop - piece.start) * segment.keys
            for segment in layout.segments
            for piece in _pieces(segment, _at_once(segment, heads))
        )
        types = (wide, wide, query.dtype, query.dtype)
        self._memory = [query.new_empty(most, dtype=dtype) for dtype in types]

    def matrices(self, *shape: int) -> list[torch.Tensor]:
        """Two of ``shape`` in the wider type, two in the query's; as the last ones left them."""
        return [memory[: math.prod(shape)].view(shape) for memory in self._memory]


def _at_once(segment: Segment, heads: int) -> int:
    """Queries of a segment whose gradients are computed together."""
    return max(_FEWEST, _SCORES // (heads * segment.keys))


def _pieces(segment: Segment, most: int) -> list[slice]:
    """The segment's queries in about equal pieces of at most ``most``, counted from its start."""
    count = -(-segment.queries // max(1, most))
    bounds = [segment.queries * number // count for number in range(count + 1)]
    return list(starmap(slice, pairwise(bounds)))


def _seen_by(segment: Segment, keys: torch.Tensor) -> torch.Tensor:
    """Of ``keys`` (T, G, D) those that the segment's last token sees."""
    own = keys[segment.start : segment.end]
    return torch.cat([keys[segment.prefix], own]) if segment.keys > segment.queries else own


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
