"""The parts of a layer between its matrix products, in plain torch: norm, rotary embedding, SwiGLU.

Each of them is one autograd function that keeps its input and recomputes what else the backward
pass needs. If Transformer Engine is installed, its layers are used instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

_CACHED = 1 << 16
"""Elements of one operand that a thread processes between two operations on a CPU."""


def _rows_at_once(matrix: torch.Tensor) -> int:
    """Slices of rows of (T, N) that are computed together."""
    if matrix.device.type != "cpu":
        return max(1, len(matrix))
    return max(1, _CACHED * torch.get_num_threads() // matrix.shape[1])


class _RMSNorm(torch.autograd.Function):
    """y = (c + w) x / rms(x) over the last dimension, in float32 from x to y."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float, centre: float
    ) -> torch.Tensor:
        x_TH = hidden.reshape(-1, hidden.shape[-1])
        y_TH, weight_H = torch.empty_like(x_TH), weight.float() + centre
        scale_T1 = x_TH.new_empty((len(x_TH), 1), dtype=torch.float32)
        size = _rows_at_once(x_TH)
        wides = x_TH.new_empty((2, min(size, len(x_TH)), x_TH.shape[1]), dtype=torch.float32)
        for x, y, scale in zip(*(t.split(size) for t in (x_TH, y_TH, scale_T1)), strict=True):
            wide, square = wides[:, : len(x)]
            wide.copy_(x)
            torch.mean(torch.mul(wide, wide, out=square), dim=-1, keepdim=True, out=scale)
            wide.mul_(scale.add_(eps).rsqrt_())
            y.copy_(wide.mul_(weight_H))
        ctx.save_for_backward(hidden, weight, scale_T1)
        ctx.centre = centre
        return y_TH.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, scale_T1 = ctx.saved_tensors
        x_TH = hidden.reshape(-1, hidden.shape[-1])
        grad_TH, out_TH = grads[0].reshape(x_TH.shape), torch.empty_like(x_TH)
        weight_H = weight.float() + ctx.centre
        sum_H = torch.zeros_like(weight_H)
        size = _rows_at_once(x_TH)
        wides = x_TH.new_empty((3, min(size, len(x_TH)), x_TH.shape[1]), dtype=torch.float32)
        pieces = (t.split(size) for t in (x_TH, grad_TH, out_TH, scale_T1))
        for x, grad, out, scale in zip(*pieces, strict=True):
            # n = x / rms ;  dn = w dy ;  dx = (dn - n mean(n dn)) / rms
            normed, wide, product = wides[:, : len(x)]
            normed.copy_(x).mul_(scale)
            wide.copy_(grad)
            torch.mul(wide, normed, out=product)
            sum_H += product.sum(dim=0)
            mean_T1 = (product @ weight_H).div_(x.shape[1]).unsqueeze(-1)
            wide.mul_(weight_H).addcmul_(normed, mean_T1, value=-1)
            out.copy_(wide.mul_(scale))
        return out_TH.view(hidden.shape), sum_H.to(weight.dtype), None, None


def rms_norm(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, centre: float = 0.0
) -> torch.Tensor:
    """hidden (..., H) divided by its root mean square and times ``centre + weight`` (H,), computed
    in float32; of hidden's shape and dtype."""
    return _RMSNorm.apply(hidden, weight, eps, centre)  # type: ignore[return-value]


class RMSNorm(torch.nn.Module):
    """Root mean square norm over the last dimension, computed in float32 (as HF does). With
    ``layernorm_zero_centered_gamma`` it multiplies with 1 + weight.

    Under sequence parallelism each tensor rank computes other tokens, so the weight is marked for
    Megatron to sum its gradient over the tensor ranks; torch's own norm lacks that mark.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps, self.centre = eps, float(config.layernorm_zero_centered_gamma)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (..., H) in any float dtype; returns the same shape and dtype."""
        return rms_norm(hidden, self.weight, self.eps, self.centre)


class _SwiGLU(torch.autograd.Function):
    """silu(a) b of (..., 2 F) = [a | b]; Shazeer, arXiv 2002.05202."""

    @staticmethod
    def forward(ctx: Any, halves: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(halves)
        a, b = halves.chunk(2, dim=-1)
        return F.silu(a).mul_(b)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (halves,), (grad,) = ctx.saved_tensors, grads
        out = torch.empty_like(halves)
        (a, b), (to_a, to_b) = halves.chunk(2, dim=-1), out.chunk(2, dim=-1)
        torch.mul(grad, F.silu(a), out=to_b)
        torch.ops.aten.silu_backward.grad_input(grad * b, a, grad_input=to_a)
        return out


class SwiGLU(torch.nn.Module):
    """The activation of Megatron's MLP, in place of Transformer Engine's."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, halves: torch.Tensor) -> torch.Tensor:
        """(..., 2 F) -> (..., F)."""
        return _SwiGLU.apply(halves)  # type: ignore[return-value]


def rotate(
    out: Sequence[torch.Tensor],
    x: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    sign: int,
) -> None:
    """out = x rotated by ``sign`` times the angles: the numbers (x1, x2) of each pair become
    (x1 cos - x2 sin, x2 cos + x1 sin). x and out: first and second numbers of all pairs, each
    (T, ..., D / 2); tables (T, 1, ..., D / 2)."""
    (x1, x2), (out1, out2) = x, out
    torch.mul(x1, cos, out=out1)
    torch.mul(x2, cos, out=out2)
    out1.addcmul_(x2, sin, value=-sign)
    out2.addcmul_(x1, sin, value=sign)


def _halves(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The pairs of an embedding that pairs number i with number i + D / 2."""
    return x.chunk(2, dim=-1)


def _rotate_first(
    out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int
) -> None:
    """out = x (T, ..., D), whose first numbers, two for each column of the tables, are rotated."""
    width = 2 * cos.shape[-1]
    rotate(_halves(out[..., :width]), _halves(x[..., :width]), cos, sin, sign)
    out[..., width:] = x[..., width:]


class _SplitAndRotate(torch.autograd.Function):
    """Queries, keys and values of (T, G, a + 2, D), the first two rotated as far as the tables
    reach."""

    @staticmethod
    def forward(
        ctx: Any, mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        tokens, groups, parts, width = mixed.shape
        query = mixed.new_empty((tokens, groups, parts - 2, width))
        key = mixed.new_empty((tokens, groups, 1, width))
        _rotate_first(query, mixed[:, :, :-2], cos, sin, 1)
        _rotate_first(key, mixed[:, :, -2:-1], cos, sin, 1)
        ctx.save_for_backward(cos, sin)
        return query, key, mixed[:, :, -1:].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = grads
        cos, sin = ctx.saved_tensors
        tokens, groups, heads, width = query.shape
        out = query.new_empty((tokens, groups, heads + 2, width))
        _rotate_first(out[:, :, :-2], query, cos, sin, -1)
        _rotate_first(out[:, :, -2:-1], key, cos, sin, -1)
        out[:, :, -1:] = value
        return out, None, None


class RotatedSelfAttention(SelfAttention):
    """Megatron's attention with our own splitting and rotation of queries and keys.

    Megatron recomputes the rotary tables in every layer; here the layers of a pass share them.
    """

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any,
        *,
        rotary_pos_emb: torch.Tensor,
        **arguments: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Megatron's forward pass for hidden_states (T / sequence ranks, 1, H)."""
        self._tables = _tables(rotary_pos_emb, self.config.params_dtype)
        return super().forward(hidden_states, attention_mask, **arguments)

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *_: Any, output_gate: bool = False, **__: Any
    ) -> tuple[torch.Tensor, ...]:
        """Query (T, 1, A, D) and key (T, 1, G, D), both rotated, value (T, 1, G, D), and with
        ``output_gate`` the gate (T, 1, A, D), whose rows follow those of its head's query."""
        mixed, _no_bias = self.linear_qkv(hidden_states)  # type: ignore[operator]
        groups, width = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        mixed = mixed.view(mixed.shape[0], groups, -1, width)
        gates = []
        if output_gate:
            heads, last = mixed[:, :, :-2].unflatten(2, (-1, 2)), mixed[:, :, -2:]
            mixed = torch.cat([heads[:, :, :, 0], last], dim=2)
            gates.append(heads[:, :, :, 1].reshape(len(mixed), 1, -1, width))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key, value = mixed.split([mixed.shape[2] - 2, 1, 1], dim=2)
            mixed = torch.cat([self.q_layernorm(query), self.k_layernorm(key), value], dim=2)
        parts = _SplitAndRotate.apply(mixed, *self._tables)
        query, key, value = (part.view(len(part), 1, -1, width) for part in parts)  # type: ignore[union-attr]
        return query, key, value, *gates


def _tables(angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (T, 1, 1, D / 2) of ``angles`` (T, 1, 1, D), cached on that tensor for the
    other layers."""
    known = getattr(angles, "tables", None)
    if known is None:
        half = angles[..., : angles.shape[-1] // 2]
        known = half.cos().to(dtype), half.sin().to(dtype)
        angles.tables = known  # type: ignore[attr-defined]
    return known
