"""Adds the gradient of a linear layer's weight to ``main_grad`` on a CPU, in the place that
Megatron has for Apex's extension ``fused_weight_gradient_mlp_cuda``, under its function's name.

In float32 the product adds by itself. In bfloat16 it is the product that takes time on processors
with AMX: oneDNN transposes its left operand, the longer the slower, and what takes 5.8 ms in a
forward pass takes 18 here. A transposed copy of the smaller operand costs one. On others a product
takes the same time either way.
"""

from __future__ import annotations

import sys

import torch

_HAS_AMX = torch.cpu._is_amx_tile_supported()


def wgrad_gemm_accum_fp32(
    hidden: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """hidden (T, K), grad_output (T, N), main_grad (N, K) float32, which is added to."""
    if hidden.dtype == main_grad.dtype:
        main_grad.addmm_(grad_output.t(), hidden)
        return
    rows, columns = main_grad.shape
    # Copies of operands of about one size take as long as they save.
    if not _HAS_AMX:
        grad = grad_output.t() @ hidden
    elif rows >= 2 * columns:
        grad = (hidden.t().contiguous() @ grad_output).t().contiguous()
    elif columns >= 2 * rows:
        grad = grad_output.t().contiguous() @ hidden
    else:
        grad = grad_output.t() @ hidden
    main_grad += grad


def install() -> None:
    """Let Megatron's linear layers use it, from now on."""
    from megatron.core.tensor_parallel import layers

    if not hasattr(layers, "_grad_accum_fusion_available"):
        raise RuntimeError("this megatron-core has no _grad_accum_fusion_available; use 0.16.1")
    layers.fused_weight_gradient_mlp_cuda = sys.modules[__name__]
    layers._grad_accum_fusion_available = True
