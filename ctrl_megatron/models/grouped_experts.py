"""A layer's experts by grouped matrix products: two products for all experts in place of two for
each. They take the numbers of tokens on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP


class _GroupedLinear(torch.autograd.Function):
    """(T, K) tokens sorted by expert, (E,) int32 ends of the experts' rows, E weights of (N, K) ->
    (T, N)

    The weights are stacked anew in the backward pass: a copy takes less than the product that reads
    it, and one that was kept would double the memory of all experts' weights.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens, ends, *weights)
        return F.grouped_mm(tokens, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tokens, ends, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_tokens = of_weights = None
        if ctx.needs_input_grad[0]:
            of_tokens = F.grouped_mm(grad, torch.stack(weights), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            of_weights = F.grouped_mm(grad.t(), tokens, offs=ends)
        none = (None,) * len(weights)
        return of_tokens, None, *(none if of_weights is None else of_weights)


class GroupedExperts(SequentialMLP):
    """Megatron's experts with their parameters. Several are computed together under
    ``moe_grouped_gemm``, otherwise one after the other, which is the oracle in tests."""

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(T, H) tokens sorted by expert, their numbers (E,) and (T,) weights -> ((T, H), None)"""
        experts: Any = self.local_experts
        first, second = (
            [getattr(e, name) for e in experts] for name in ("linear_fc1", "linear_fc2")
        )
        if not self.config.moe_grouped_gemm or len(experts) == 1:
            return super().forward(tokens, tokens_per_expert, probs)
        ends = tokens_per_expert.to(tokens.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        hidden: Any = _adapted_products(tokens, ends, first)
        hidden = weighted_bias_swiglu_impl(hidden, None, probs.unsqueeze(-1))
        return _adapted_products(hidden, ends, second), None


def leave_counts_on_device(dispatcher: Any) -> None:
    """Let Megatron's ``dispatcher`` not wait for the numbers of tokens of a layer whose experts are
    all on this rank: the host needs them for exchanges between ranks alone."""
    if dispatcher.ep_size == dispatcher.tp_size == 1:
        dispatcher._maybe_dtoh_and_synchronize = lambda point, counts=None: counts


def _adapted_products(tokens: torch.Tensor, ends: torch.Tensor, layers: list[Any]) -> torch.Tensor:
    """(T, out) what the same linear layer of every expert makes of its rows, which end at ``ends``,
    its adapter included."""

    def product(rows: torch.Tensor, matrices: Sequence[torch.Tensor]) -> Any:
        return _GroupedLinear.apply(rows, ends, *matrices)

    out = product(tokens, [layer.weight for layer in layers])
    adapter = getattr(layers[0], "adapter", None)
    if adapter is None or not adapter.on:
        return out
    return out + adapter.addition(tokens, [layer.adapter for layer in layers], product)
