"""Norm, rotary embedding and SwiGLU against plain formulas in float64 and against Megatron's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ctrl_megatron.models import layers

LENGTHS = (5, 1, 9)
TOKENS = sum(LENGTHS)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


def swiglu(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


FUNCTIONS: dict[str, tuple[Any, Any, tuple[tuple[int, ...], ...]]] = {
    "norm": (lambda x, w: layers.rms_norm(x, w, 1e-5), normed, ((TOKENS, 1, 96), (96,))),
    "zero-centred norm": (
        lambda x, w: layers.rms_norm(x, w, 1e-5, 1.0),
        lambda x, w: normed(x, 1 + w),
        ((TOKENS, 1, 96), (96,)),
    ),
    "head norm": (
        lambda x, w: layers.rms_norm(x.split([2, 1], 2)[0], w, 1e-5),
        lambda x, w: normed(x[:, :, :2], w),
        ((TOKENS, 2, 3, 8), (8,)),
    ),
    "swiglu": (layers._SwiGLU.apply, swiglu, ((TOKENS, 1, 64),)),
}


def with_gradients(function: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    upstream = torch.linspace(-1, 2, out.numel()).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("cached", [96, 1 << 16])
def test_values_and_gradients_equal_the_formula_in_float64(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, limit: float, cached: int
) -> None:
    monkeypatch.setattr(layers, "_CACHED", cached)  # 96: rows one by one
    ours, formula, shapes = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    found = with_gradients(ours, inputs)
    wanted = with_gradients(formula, [x.double() for x in inputs])
    for left, right in zip(found, wanted, strict=True):
        assert left.dtype == dtype
        assert (left.double() - right).norm() < limit * right.norm()


def test_the_norm_is_at_least_as_close_to_float64_as_that_of_transformers() -> None:
    x = torch.randn(64, 576, generator=torch.Generator().manual_seed(2)).bfloat16()
    theirs = LlamaRMSNorm(576, 1e-5).bfloat16()
    torch.nn.init.uniform_(theirs.weight, 0.5, 1.5)
    weight = theirs.weight.detach()
    exact = normed(x.double(), weight.double())
    gaps = [
        (y.double() - exact).norm() for y in (layers.rms_norm(x, weight, 1e-5), theirs(x).detach())
    ]
    assert gaps[0] <= gaps[1]


def test_rotation_equals_megatrons() -> None:
    groups, heads, width = 2, 3, 8
    generator = torch.Generator().manual_seed(3)
    mixed = torch.randn(TOKENS, groups, heads + 2, width, generator=generator)
    angles = torch.outer(torch.arange(9.0), 0.3 ** torch.arange(width // 2))
    angles = torch.cat([angles, angles], -1)[:, None, None, :]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    alone: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)

    def megatrons(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = x.split([heads, 1, 1], dim=2)
        turned = [
            _apply_rotary_pos_emb_thd(part.flatten(1, 2), bounds, angles, cp_group=alone)
            for part in (query, key)
        ]
        return (*turned, value.flatten(1, 2))

    def ours(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.cat([angles[:n] for n in LENGTHS])
        tables = layers._tables(rows, x.dtype)
        assert layers._tables(rows, x.dtype) is tables
        return tuple(part.flatten(1, 2) for part in layers._SplitAndRotate.apply(x, *tables))

    def flat(function: Any) -> Any:
        return lambda x: torch.cat([part.flatten() for part in function(x)])

    for left, right in zip(
        with_gradients(flat(ours), [mixed]), with_gradients(flat(megatrons), [mixed]), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)
