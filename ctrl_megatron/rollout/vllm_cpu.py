"""What vLLM leaves to plain torch on a CPU although it brings a kernel for it, or computes although
nobody asks: a quarter of a decoding step of a small model (``docs/experiments/engines.md``)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.v1.outputs import LogprobsTensors


def spare(model: torch.nn.Module, sampler: Any) -> None:
    """Let ``model`` compute its norms in one kernel each and call its attention without a detour,
    and ``sampler`` rank no tokens."""
    for layer in model.modules():
        if isinstance(layer, RMSNorm) and layer.has_weight and layer.variance_size_override is None:
            # What a CustomOp calls; vLLM chooses kernels of its own here on GPUs only.
            layer._forward_method = partial(_norm, layer)
        if isinstance(layer, Attention):
            # Otherwise by way of torch's dispatcher, for a compiler that does not run here.
            layer.use_direct_call = True
    sampler.gather_logprobs = partial(_gather_log_probs, sampler.gather_logprobs)


def _norm(norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """As ``RMSNorm.forward``: the norm of x, or of x + residual with that sum; in place there."""
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
    """As ``Sampler.gather_logprobs``, which is ``ranked``: where no other token is asked for, that
    of the drawn one alone, and rank 0, which means nothing, instead of a pass over all logits."""
    if num_logprobs:
        return ranked(logprobs, num_logprobs, token_ids)
    own = token_ids.unsqueeze(-1)
    return LogprobsTensors(
        own.to(torch.int32), logprobs.gather(-1, own), torch.zeros_like(token_ids)
    )
