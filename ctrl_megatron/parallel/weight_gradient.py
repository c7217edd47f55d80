"""Adds the gradient of a linear layer's weight to ``main_grad`` on a CPU, in place of Apex's
extension ``fused_weight_gradient_mlp_cuda``, whose function name Megatron calls.

In float32 one matrix product also adds. In bfloat16 the product itself is slow on processors with
AMX: oneDNN transposes its left operand, which takes the longer the larger it is, and a product of
5.8 ms in a forward pass takes 18 ms here. A transposed copy of the smaller operand takes 1 ms. On
other processors a product takes the same time either way.
"""

from __future__ import annotations

import sys

import torch

_HAS_AMX = torch.cpu._is_amx_tile_supported()


def wgrad_gemm_accum_fp32(
    hidden: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Add grad_output.T @ hidden to ``main_grad`` (N, K) float32, in place; ``grad_output`` is (T,
    N) and ``hidden`` (T, K), both of the compute dtype."""
    if hidden.dtype == main_grad.dtype:
        main_grad.addmm_(grad_output.t(), hidden)
        return
    rows, columns = main_grad.shape
    # With operands of about the same size a copy costs as much as it saves.
    if not _HAS_AMX:
        grad = grad_output.t() @ hidden
    elif rows >= 2 * columns:
        grad = (hidden.t().contiguous() @ grad_output).t().contiguous()
    elif columns >= 2 * rows:
        grad = grad_output.t().contiguous() @ hidden
    else:
        grad = grad_output.t() @ hidden
    main_grad += grad


def install_weight_gradient() -> None:
    """Make Megatron's linear layers use ``wgrad_gemm_accum_fp32`` from now on."""
    from megatron.core.tensor_parallel import layers

    if not hasattr(layers, "_grad_accum_fusion_available"):
        raise RuntimeError("this megatron-core has no _grad_accum_fusion_available; use 0.16.1")
    layers.fused_weight_gradient_mlp_cuda = sys.modules[__name__]
    layers._grad_accum_fusion_available = True
