"""Shortcuts for vLLM on a CPU: kernels that it has but does not use, and results without a reader.
They save a quarter of a decoding step of a small model (``docs/experiments/engines.md``)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.v1.outputs import LogprobsTensors


def spare(model: torch.nn.Module, sampler: Any) -> None:
    """Make ``model`` compute each norm in one kernel and call its attention directly, and keep
    ``sampler`` from ranking tokens."""
    for layer in model.modules():
        if isinstance(layer, RMSNorm) and layer.has_weight and layer.variance_size_override is None:
            # The method that a CustomOp calls; vLLM selects its own kernels only on GPUs.
            layer._forward_method = partial(_norm, layer)
        if isinstance(layer, Attention):
            # Otherwise through torch's dispatcher, for a compiler that does not run here.
            layer.use_direct_call = True
    sampler.gather_logprobs = partial(_gather_log_probs, sampler.gather_logprobs)


def _norm(norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """As ``RMSNorm.forward``: the norm of x; with ``residual`` the norm of x + residual and that
    sum, both in place."""
    weight, eps = norm.weight.data, norm.variance_epsilon
    if residual is None:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x.contiguous(), weight, eps)
        return out
    torch.ops._C.fused_add_rms_norm(x, residual, weight, eps)
    return x, residual


def _gather_log_probs(
    ranked: Any, logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
) -> LogprobsTensors:
    """As ``Sampler.gather_logprobs``, which is ``ranked``; if no other tokens are requested, only
    the drawn token's log-prob with a meaningless rank 0, without a pass over all logits."""
    if num_logprobs:
        return ranked(logprobs, num_logprobs, token_ids)
    own = token_ids.unsqueeze(-1)
    return LogprobsTensors(
        own.to(torch.int32), logprobs.gather(-1, own), torch.zeros_like(token_ids)
    )
