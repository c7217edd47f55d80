"""The Triton kernels of the softmax, in Triton's interpreter on a CPU: the environments of ``make
test-next`` and ``make test-oldest`` have Triton."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ctrl_megatron.parallel import vocab

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Triton decides when a kernel is defined whether it is interpreted, and of its own functions
    when it is imported: the two commands set the variable for the whole process."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    name = "ctrl_megatron.parallel.softmax_kernels"
    monkeypatch.delitem(sys.modules, name, raising=False)
    from ctrl_megatron.parallel import softmax_kernels

    monkeypatch.setattr(softmax_kernels, "_BLOCK", 64)
    yield softmax_kernels
    sys.modules.pop(name, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 63, 64, 200])
def test_kernels_are_the_formulas(kernels: Any, dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(columns)
    rows, scale = 5, 1.7
    # A part of wider rows, as a tile's last columns are.
    logits = torch.randn(rows, 256).mul_(4).to(dtype)[:, :columns]
    peak, total, weighted = kernels.softmax_statistics(logits, scale)
    wide = logits.double()
    bits = (wide - wide.amax(-1, keepdim=True)) * scale
    for found, want in (
        (peak, wide.amax(-1)),
        (total, bits.exp2().sum(-1)),
        (weighted, (bits.exp2() * bits).sum(-1)),
    ):
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
    constant, slope, hit = torch.randn(3, rows)
    targets = torch.tensor([0, columns - 1, columns, -1, columns // 2])
    for used in (None, slope):
        written = logits.clone()
        kernels.write_softmax_gradient(written, peak, constant, used, targets, hit, scale)
        want = bits.exp2() * (constant[:, None] + (0 if used is None else slope[:, None] * bits))
        for row, target in enumerate(targets.tolist()):
            if 0 <= target < columns:
                want[row, target] += hit[row]
        size = 1e-5 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(written.double(), want, rtol=size, atol=size)


@pytest.mark.parametrize("uses_entropy", [False, True])
def test_log_probs_and_gradients_are_those_without_kernels(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, uses_entropy: bool
) -> None:
    torch.manual_seed(3)
    hidden, weight = torch.randn(70, 16), torch.randn(230, 16)
    targets, grads = torch.randint(0, 230, (70,)), torch.randn(2, 70)
    # Several tiles in both directions.
    monkeypatch.setattr(vocab, "_LOGITS", 1 << 11)
    monkeypatch.setattr(vocab, "_COLUMNS", 100)
    results = []
    for chosen in (None, kernels):
        monkeypatch.setattr(vocab, "_kernels", lambda device, chosen=chosen: chosen)
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        given: Any = {"vocab_size": 230, "temperature": 0.7, "chunk": 8}
        outputs = vocab.linear_log_probs(inputs[0], inputs[1], targets, **given)
        scored = [(out * grad).sum() for out, grad in zip(outputs, grads, strict=True)]
        (scored[0] + scored[1] * uses_entropy).backward()
        results.append([*outputs, *(one.grad for one in inputs)])
    for ours, plain in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
