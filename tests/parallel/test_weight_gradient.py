"""A weight's gradient is added to what earlier micro-batches left; Megatron's layers call it."""

from __future__ import annotations

import pytest
import torch

from ctrl_megatron.parallel import weight_gradient
from ctrl_megatron.parallel.weight_gradient import wgrad_gemm_accum_fp32


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("shape", [(32, 16), (16, 32), (16, 16), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_added(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], dtype: torch.dtype, amx: bool
) -> None:
    monkeypatch.setattr(weight_gradient, "_HAS_AMX", amx)
    generator = torch.Generator().manual_seed(0)
    hidden, grad_output = (
        torch.randn(7, width, generator=generator).to(dtype) for width in reversed(shape)
    )
    before = torch.randn(shape, generator=generator)
    found = before.clone()
    wgrad_gemm_accum_fp32(hidden, grad_output, found)
    product = grad_output.double().t() @ hidden.double()
    # A product in bfloat16 is rounded once; the sum is float32's.
    eps = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(
        found.double() - before.double(),
        product,
        rtol=eps,
        atol=2 * eps * float(product.abs().max()),
    )


def test_a_model_on_a_cpu_names_it() -> None:
    from ctrl_megatron.models.kernels import kernel_providers
    from ctrl_megatron.parallel import cpu_platform

    if torch.cuda.is_available():
        pytest.skip("on a GPU Apex or Transformer Engine does it")
    cpu_platform.install_cpu_platform()
    assert kernel_providers()["gradient accumulation"] == "ctrl_megatron.parallel.weight_gradient"
