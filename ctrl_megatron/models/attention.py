"""Attention over a packed micro-batch whose segments may share a prefix (``packed_layout``).

``attend_packed`` computes it for a layer; the modules that Megatron builds wrap this function.
There are two ways: segment by segment, and in one variable-length call with the prefix's keys
gathered for every segment, by Transformer Engine or torch's own flash attention.
``attention_kernel`` selects one for a GPU. Values may have another width than queries and keys.
"""

from __future__ import annotations

import enum
import math
from functools import partial
from itertools import pairwise, starmap
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import varlen

from ctrl_megatron.models import attention_kernel
from ctrl_megatron.models.context_parallel import attend_over_context_ranks
from ctrl_megatron.models.packed_layout import PackedLayout, PackedLayoutParams, Segment
from ctrl_megatron.torch_features import varlen_attention_needs_enable_gqa

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_APART = 256
"""Shortest prefix, in tokens, to which all responses attend in one call without a mask, merged with
every response's attention to itself; below it a mask takes less time than a second call."""
_TOGETHER = 256
"""Most queries of a segment under one mask, and in the matrix products of a backward pass. Half of
the products among them are masked and wasted, but long matrices are faster."""


class PackedAttention(torch.nn.Module):
    """Attention in plain torch, without a (T x T) mask or scores and without flops between tokens
    that do not see each other."""

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
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
        """(T, A * Dv) attention; shapes as in ``PackedAttentionFunction``."""
        own = partial(attend_packed, scale=self.scale)
        return attend_over_context_ranks(own, query, key, value, packed_seq_params).flatten(1)


class PackedAttentionFunction(Protocol):
    """Attention over a packed layout."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        packed: PackedLayoutParams,
        scale: float | None,
        /,
    ) -> torch.Tensor:
        """(Q, A, Dv) context of query (Q, A, Dk), key (T, G, Dk) and value (T, G, Dv), where G
        divides A; all of one float dtype. Queries are those of the layout's segments, one segment
        after the other, so that Q is T where the segments have all tokens. A scale of None is
        1 / sqrt(Dk)."""
        ...


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedLayoutParams,
    scale: float | None,
) -> torch.Tensor:
    """(Q, A, Dv) attention of query (Q, A, Dk), key (T, G, Dk) and value (T, G, Dv), as
    ``PackedAttentionFunction`` says, by torch's kernel for the tensors' device and dtype.
    """
    kernel = attention_kernel.attention_kernel_on(query.device, query.dtype)
    return _KERNELS[kernel](query, key, value, packed, scale)


def segment_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedLayoutParams,
    scale: float | None,
) -> torch.Tensor:
    """(Q, A, Dv) attention as ``PackedAttentionFunction`` says, by ``SegmentAttention``."""
    return SegmentAttention.apply(query, key, value, packed.layout, scale)  # type: ignore[return-value]


class SegmentAttention(torch.autograd.Function):
    """Attention segment by segment.

    The forward pass uses torch's fused kernel. The backward pass multiplies some queries with all
    keys that they see and recomputes the probabilities from the log-sum-exp of the forward pass:
    torch's own kernel works head by head and takes up to twice as long
    (``docs/experiments/update.md``).
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
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        queries, keys, values, factor = _of_equal_width(query, key, value, scale)
        wide = torch.promote_types(query.dtype, torch.float32)
        log_sum = query.new_empty(query.shape[:2], dtype=wide)

        def attend(
            rows: slice, k: torch.Tensor, v: torch.Tensor, **mask: Any
        ) -> tuple[torch.Tensor, ...]:
            q, k, v = map(_batched, (queries[rows], k, v))
            context, log = map(_flat, _forward(q, k, v, **mask, scale=factor))
            return context[..., : value.shape[2]], log

        here = 0
        for prefix, members in layout.segments_by_prefix():
            before, first = prefix.stop - prefix.start, here
            apart = before >= _APART or not layout.causal
            for segment in members:
                tokens, start = slice(segment.start, segment.end), here
                here += segment.num_queries
                if before == 0 or apart:
                    rows = slice(start, here)
                    out[rows], log_sum[rows] = attend(
                        rows, keys[tokens], values[tokens], is_causal=layout.causal
                    )
                    continue
                k, v = (torch.cat([x[prefix], x[tokens]]) for x in (keys, values))
                for piece in _pieces(segment):
                    rows = slice(start + piece.start, start + piece.stop)
                    seen = before + piece.stop
                    mask = query.new_full((piece.stop - piece.start, seen), -torch.inf)
                    mask.triu_(before + piece.start + 1)
                    out[rows], log_sum[rows] = attend(rows, k[:seen], v[:seen], attn_mask=mask)
            if before and apart:
                rows = slice(first, here)
                there, sum_there = attend(rows, keys[prefix], values[prefix])
                # Each part's share of the softmax over all these keys (arXiv 2310.01889).
                ahead = log_sum[rows] - sum_there
                share = ahead.sigmoid().unsqueeze(-1)
                out[rows] = torch.lerp(there.to(wide), out[rows].to(wide), share)
                log_sum[rows] = sum_there - F.logsigmoid(-ahead)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        (given,), layout = grads, ctx.layout
        heads, width, groups, wide = *query.shape[1:], key.shape[1], log_sum.dtype
        scale = width**-0.5 if ctx.scale is None else ctx.scale
        # P = 2^(S - L) and dS = P (dP - mean), where mean is the row's sum of P dP, which equals
        # that of dO O (arXiv 2307.08691). L and mean are extra columns in the products, against -1
        # among keys and values, so they are subtracted before rounding and without another pass.
        # Powers of two: torch's exp is three times slower where MKL computes it on an AMD.
        bits = math.log2(math.e)
        log_sum = (log_sum * bits).unsqueeze(-1)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(x, dtype=wide) for x in (key, value))
        scratch = _Scratch(layout, query, wide)

        def by_group(x: torch.Tensor) -> torch.Tensor:
            """(n, A, ...) -> (G, A / G * n, ...): a matrix of all queries that share a key head."""
            return x.transpose(0, 1).reshape(groups, -1, *x.shape[2:])

        here = 0
        for prefix, members in layout.segments_by_prefix():
            before, most = prefix.stop - prefix.start, max(segment.num_keys for segment in members)
            family = _FamilyKeys(key, value, most, scale * bits, wide)
            family.bring(prefix, 0)
            for segment in members:
                own = slice(segment.start, segment.end)
                family.bring(own, before)
                for piece in _pieces(segment):
                    count = piece.stop - piece.start
                    seen = before + piece.stop if layout.causal else segment.num_keys
                    rows = slice(here + piece.start, here + piece.stop)
                    q, g, o, log = (by_group(x[rows]) for x in (query, given, out, log_sum))
                    mean = (g.to(wide) * o).sum(-1, keepdim=True)
                    low = mean.to(g.dtype)
                    q_log = torch.cat([q, log], -1)
                    g_mean = torch.cat([g, low, (mean - low).to(g.dtype)], -1)
                    wide_probs, probs, grad = scratch.matrices(groups, q.shape[1], seen)
                    torch.bmm(q_log, family.scaled[:, :seen].mT, out=wide_probs)
                    wide_probs.exp2_()
                    if layout.causal:
                        # Zeros replace infinite values for later tokens too.
                        wide_probs.view(heads, count, seen).tril_(seen - count)
                    probs.copy_(wide_probs)
                    torch.bmm(g_mean, family.values[:, :seen].mT, out=grad).mul_(probs)
                    family.grad_values[:, :seen] += torch.bmm(probs.mT, g)
                    family.grad_keys[:, :seen] += torch.bmm(grad.mT, q)
                    products = torch.bmm(grad, family.keys[:, :seen])
                    grad_query[rows] = products.view(heads, count, width).transpose(0, 1)
                family.take_gradients(own, before, grad_key, grad_value)
                here += segment.num_queries
            family.take_gradients(prefix, 0, grad_key, grad_value)
        dtype = query.dtype
        return (
            grad_query.mul_(scale),
            grad_key.mul_(scale).to(dtype),
            grad_value.to(dtype),
            None,
            None,
        )


class _FamilyKeys:
    """Keys and values of a family (segments with one prefix) as (G, n, Dk) and (G, n, Dv) matrices,
    with their gradients: first the prefix's, then those of one member after the other.

    ``scaled`` are the keys in the wide dtype times a factor. Its last column and the last two of
    ``values`` are -1.
    """

    def __init__(
        self, key: torch.Tensor, value: torch.Tensor, most: int, factor: float, wide: torch.dtype
    ) -> None:
        self._given, self._factor = (key, value), factor
        groups, width = key.shape[1:]
        self.keys = key.new_empty((groups, most, width))
        self.scaled = key.new_full((groups, most, width + 1), -1.0, dtype=wide)
        self.values = value.new_full((groups, most, value.shape[2] + 2), -1.0)
        self.grad_keys, self.grad_values = (
            x.new_empty((groups, most, x.shape[2]), dtype=wide) for x in (key, value)
        )

    def bring(self, tokens: slice, start: int) -> None:
        """Copy the keys and values of ``tokens`` to ``start`` and set their gradients to zero."""
        there = slice(start, start + tokens.stop - tokens.start)
        keys, values = (x[tokens].transpose(0, 1) for x in self._given)
        self.keys[:, there] = keys
        self.scaled[:, there, :-1] = keys
        self.scaled[:, there, :-1] *= self._factor
        self.values[:, there, :-2] = values
        self.grad_keys[:, there] = self.grad_values[:, there] = 0.0

    def take_gradients(
        self, tokens: slice, start: int, grad_key: torch.Tensor, grad_value: torch.Tensor
    ) -> None:
        """Add the gradients of ``tokens``, at ``start`` here, to those of all tokens."""
        there = slice(start, start + tokens.stop - tokens.start)
        grad_key[tokens] += self.grad_keys[:, there].transpose(0, 1)
        grad_value[tokens] += self.grad_values[:, there].transpose(0, 1)


class _Scratch:
    """Buffers that stay in the processor's cache from one piece of a backward pass to the next."""

    def __init__(self, layout: PackedLayout, query: torch.Tensor, wide: torch.dtype) -> None:
        most = query.shape[1] * max(
            min(_TOGETHER, segment.num_queries) * segment.num_keys for segment in layout.segments
        )
        types = (wide, query.dtype, query.dtype)
        self._memory = [query.new_empty(most, dtype=dtype) for dtype in types]

    def matrices(self, *shape: int) -> list[torch.Tensor]:
        """One buffer of ``shape`` in the wide dtype, two in the query's, with undefined content."""
        return [memory[: math.prod(shape)].view(shape) for memory in self._memory]


def _pieces(segment: Segment) -> list[slice]:
    """The segment's queries in pieces of about equal size, counted from its start."""
    count = -(-segment.num_queries // _TOGETHER)
    bounds = [segment.num_queries * number // count for number in range(count + 1)]
    return list(starmap(slice, pairwise(bounds)))


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
    """(Q, A, Dv) attention as ``PackedAttentionFunction`` says, by one call of torch's flash
    attention.
    """
    bounds = packed.attention
    q, k, v, factor = _of_equal_width(query, key, value, scale)
    groups: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]}
    out: Any = varlen.varlen_attn(
        q,
        _seen(k, packed),
        _seen(v, packed),
        bounds.cu_seqlens_q,
        bounds.cu_seqlens_kv,
        bounds.max_seqlen_q,
        bounds.max_seqlen_kv,
        scale=factor,
        # With more keys than queries flash attention aligns a causal mask at the bottom right.
        window_size=(-1, 0) if packed.layout.causal else (-1, -1),
        **(groups if varlen_attention_needs_enable_gqa() else {}),
    )
    return out[..., : value.shape[2]]


def _of_equal_width(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float | None]:
    """The tensors with zeros appended to the narrower ones, and the scale of the original width.

    Torch's fused kernels require equal widths. The zeros change no score and make columns of the
    context that are cut off; the product with the values takes as long as if they were as wide.
    """
    width = query.shape[2]
    more = value.shape[2] - width
    if more == 0:
        return query, key, value, scale
    scale = width**-0.5 if scale is None else scale
    if more < 0:
        return query, key, F.pad(value, (0, -more)), scale
    return F.pad(query, (0, more)), F.pad(key, (0, more)), value, scale


def _seen(keys: torch.Tensor, packed: PackedLayoutParams) -> torch.Tensor:
    """The keys or values that every segment sees, one segment after the other."""
    return keys if packed.key_index is None else keys.index_select(0, packed.key_index)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedLayoutParams,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """``PackedAttentionFunction`` segment by segment, with a mask for a prefix; for any device and
    dtype. With a ``window`` a token sees only so many tokens of its row, itself included.
    """
    outputs, segments = [], packed.layout.segments
    queries = query.split([segment.num_queries for segment in segments])
    for segment, q in zip(segments, queries, strict=True):
        own, prefix = slice(segment.start, segment.end), segment.prefix
        shared = segment.prefix_end > segment.prefix_start
        mask, before = None, segment.num_keys - segment.num_queries
        narrow = window is not None and window < segment.num_keys
        if (shared or narrow) and packed.layout.causal:
            mask = torch.ones(
                segment.num_queries, segment.num_keys, dtype=torch.bool, device=query.device
            )
            mask = mask.tril(before)
            if window is not None:
                mask = mask.triu(before - window + 1)
        k, v = (torch.cat([x[prefix], x[own]]) if shared else x[own] for x in (key, value))
        out = F.scaled_dot_product_attention(
            _batched(q),
            _batched(k),
            _batched(v),
            attn_mask=mask,
            is_causal=packed.layout.causal and mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(_flat(out))
    return torch.cat(outputs)


_KERNELS: dict[attention_kernel.Kernel, PackedAttentionFunction] = {
    "segments": segment_attention,
    "masked": masked_attention,
    "varlen": variable_length_attention,
    # Layers that are not its own do not call it; GPUs for which it has a kernel have torch's too.
    "transformer_engine": variable_length_attention,
}


class _TeMask(enum.Enum):
    """Masks of Transformer Engine that Megatron's ``AttnMaskType`` does not name."""

    padding_causal_bottom_right = 1


def shared_prefix_attention_class(kernel: Any) -> type:
    """Megatron's attention class ``kernel`` (``TEDotProductAttention``) for packed layouts."""

    class VariableLengthAttention(kernel):
        """One variable-length call of Transformer Engine, if it has a kernel for that."""

        def __init__(self, *args: Any, softmax_scale: float | None = None, **options: Any) -> None:
            super().__init__(*args, softmax_scale=softmax_scale, **options)
            self._packed_scale = softmax_scale

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
            """(T, A * Dv) attention; shapes as in ``PackedAttentionFunction``."""
            own = partial(attend_packed, scale=self._packed_scale)
            if (
                attention_kernel.attention_kernel_on(query.device, query.dtype)
                == "transformer_engine"
            ):
                own = partial(self._attend, attention_mask, attn_mask_type, attention_bias)
            return attend_over_context_ranks(own, query, key, value, packed_seq_params).flatten(1)

        def _attend(
            self,
            mask: torch.Tensor | None,
            mask_type: Any,
            bias: torch.Tensor | None,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            packed: PackedLayoutParams,
        ) -> torch.Tensor:
            if not packed.layout.causal:
                mask_type = AttnMaskType.padding
            elif packed.key_index is not None:
                mask_type = _TeMask.padding_causal_bottom_right
            # Transformer Engine refuses another number; context ranks have a part of the heads.
            self.num_gqa_groups_per_partition = key.shape[1]
            context = super().forward(
                query,
                _seen(key, packed),
                _seen(value, packed),
                mask,
                attn_mask_type=mask_type,
                attention_bias=bias,
                packed_seq_params=packed.attention,
            )
            return context.view(len(query), query.shape[1], -1)

    # Reports name the library of the kernel.
    VariableLengthAttention.__module__ = kernel.__module__
    VariableLengthAttention.__qualname__ = kernel.__qualname__
    return VariableLengthAttention
