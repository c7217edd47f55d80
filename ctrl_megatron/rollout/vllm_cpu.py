"""vLLM on a CPU: shortcuts, and experts, which it packs for its kernel.

The shortcuts are kernels that it has but does not use, and results without a reader. They save a
quarter of a decoding step of a small model (``docs/experiments/engines.md``).
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.v1.outputs import LogprobsTensors


def install_cpu_kernels(model: torch.nn.Module, sampler: Any) -> None:
    """Make ``model`` compute each norm in one kernel and call its attention directly, and keep
    ``sampler`` from ranking tokens. Convolutions take a prompt of one token too. Once in a
    process."""
    for layer in model.modules():
        if isinstance(layer, RMSNorm) and layer.has_weight and layer.variance_size_override is None:
            # The method that a CustomOp calls; vLLM selects its own kernels only on GPUs.
            layer._forward_method = partial(_norm, layer)
        if isinstance(layer, Attention):
            # Otherwise through torch's dispatcher, for a compiler that does not run here.
            layer.use_direct_call = True
    sampler.gather_logprobs = partial(_gather_log_probs, sampler.gather_logprobs)
    own = gdn_attention._causal_conv1d_fwd_cpu
    gdn_attention._causal_conv1d_fwd_cpu = partial(_convolution, own)


def mark_experts_unpacked(model: torch.nn.Module) -> None:
    """Make the next load of ``model`` pack its experts for the kernel.

    vLLM 0.32 packs and pads them only when it makes the kernel, and not when weights are updated:
    the kernel would then compute with weights in another order.
    """
    for layer in model.modules():
        if isinstance(layer, RoutedExperts) and _experts_kernel(layer) is not None:
            layer.quant_method.moe_kernel = None


def unpacked_experts(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(E, 2 * width, hidden) and (E, hidden, width): the rows of gate and up, and those of down,
    from the weights that are packed for the kernel."""
    kernel, width = _experts_kernel(layer), layer.moe_config.intermediate_size_per_partition
    assert kernel is not None
    if kernel._use_zentorch:
        return layer.w13_weight, layer.w2_weight
    gate_up, down = (
        _unpacked(weight, kernel.isa) for weight in (layer.w13_weight, layer.w2_weight)
    )
    halves = [half[:, :width] for half in gate_up.chunk(2, dim=1)]
    return torch.cat(halves, dim=1), down[..., :width]


def _experts_kernel(layer: Any) -> CPUUnquantizedExperts | None:
    """The CPU kernel that computes ``layer``; None where another kernel does."""
    kernel: Any = layer.quant_method.moe_kernel
    found = None if kernel is None else kernel.fused_experts
    return found if isinstance(found, CPUUnquantizedExperts) else None


def _unpacked(packed: torch.Tensor, isa: str) -> torch.Tensor:
    """(E, out, in) weights in the order before packing."""
    experts, out, width = packed.shape
    weights = torch.empty_like(packed)
    places = _places(out, width, packed.dtype, isa)
    weights.view(experts, -1)[:, places] = packed.detach().view(experts, -1)
    return weights


@lru_cache(maxsize=8)
def _places(out: int, width: int, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """(out * width,) int64: where each element of a packed (out, width) weight was before.

    Packing moves elements, so it is shown the digits of every element's place, in base 256, which
    every dtype represents exactly.
    """
    number = torch.arange(out * width)
    places, shift = torch.zeros_like(number), 0
    while (out * width - 1) >> shift:
        digits = (number >> shift & 255).to(dtype).view(1, out, width)
        places += cpu_prepack_moe_weight(digits, isa).flatten().long() << shift
        shift += 8
    return places


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


def _convolution(kernel: Any, *, x: torch.Tensor, **named: Any) -> torch.Tensor:
    """As ``_causal_conv1d_fwd_cpu``, which is ``kernel``. It refuses a single token, whose (width,
    1) numbers torch takes for contiguous in both orders, unless their strides are those of several
    tokens."""
    return kernel(x=x.t().clone(memory_format=torch.contiguous_format).t(), **named)


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
