"""Divergences over a vocabulary, from hidden states, against whole logits in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ctrl_megatron.algorithms.distillation import token_divergence
from ctrl_megatron.parallel.divergence import OutputLayer

NAMES: tuple[Any, ...] = ("reverse_kl", "forward_kl", "jsd")


def layers(seed: int, tokens: int, vocab: int, chunk: int) -> tuple[OutputLayer, OutputLayer]:
    """Student and teacher of hidden sizes 7 and 5."""
    generator = torch.Generator().manual_seed(seed)

    def layer(size: int) -> OutputLayer:
        hidden, weight = (torch.randn(n, size, generator=generator) for n in (tokens, vocab))
        return OutputLayer(hidden=hidden, weight=weight, vocab_size=vocab, chunk=chunk)

    return layer(7), layer(5)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**31 - 1),
    st.integers(0, 9),
    st.integers(1, 30),
    st.integers(1, 11),
    st.sampled_from(NAMES),
    st.sampled_from([0.6, 1.0, 2.0]),
)
def test_values_and_gradients_equal_whole_logits_in_float64(
    seed: int, tokens: int, vocab: int, chunk: int, name: Any, temperature: float
) -> None:
    student, teacher = layers(seed, tokens, vocab, chunk)
    assert student.weight is not None and teacher.weight is not None
    upstream = torch.linspace(-1, 2, tokens)
    leaves = student.hidden.requires_grad_(), student.weight.requires_grad_()
    found = student.divergence_from(teacher, name, temperature, jsd_weight=0.3)
    (found * upstream).sum().backward()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    theirs = (teacher.hidden.double() @ teacher.weight.double().t() / temperature).log_softmax(-1)
    logs = (exact[0] @ exact[1].t() / temperature).log_softmax(-1)
    wanted = token_divergence(logs, theirs, name, jsd_weight=0.3)
    (wanted * upstream.double()).sum().backward()
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)
    for leaf, other in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), other.grad, rtol=2e-5, atol=2e-5)  # type: ignore[union-attr]


def test_bfloat16_stays_near() -> None:
    student, teacher = layers(3, 40, 64, 9)
    assert student.weight is not None and teacher.weight is not None
    low = [
        OutputLayer(
            hidden=one.hidden.bfloat16().requires_grad_(),
            weight=one.weight.bfloat16(),  # type: ignore[union-attr]
            vocab_size=64,
            chunk=9,
        )
        for one in (student, teacher)
    ]
    found = low[0].divergence_from(low[1], "reverse_kl", 1.0)
    wanted = student.divergence_from(teacher, "reverse_kl", 1.0)
    assert float((found - wanted).norm() / wanted.norm()) < 0.01
    assert found.dtype == torch.float32
    found.sum().backward()
    assert low[0].hidden.grad is not None and low[0].hidden.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("chunk", [3, 100])
def test_the_likeliest_tokens_are_those_of_the_softmax(chunk: int) -> None:
    layer, _ = layers(5, 20, 31, chunk)
    assert layer.weight is not None
    logs = (layer.hidden @ layer.weight.t() / 0.7).log_softmax(-1)
    ids, found = layer.likeliest(4, 0.7)
    wanted = logs.topk(4, dim=-1)
    assert torch.equal(ids, wanted.indices)
    torch.testing.assert_close(found, wanted.values)
    chosen, entropy = layer.log_probs(ids, 0.7)
    torch.testing.assert_close(chosen, found)
    logits = OutputLayer(hidden=layer.hidden @ layer.weight.t(), weight=None, vocab_size=31)
    torch.testing.assert_close(logits.likeliest(4, 0.7)[1], found)
    given_logits = logits.log_probs(ids, 0.7)
    torch.testing.assert_close(given_logits[0], found)
    torch.testing.assert_close(given_logits[1], entropy)
    with pytest.raises(ValueError, match="a vocabulary of 31 has no 32 likeliest tokens"):
        layer.likeliest(32, 1.0)


class Memory(TorchDispatchMode):
    """The most bytes that were alive at once of tensors made in the block, not of ``inputs``."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self._alive = {tensor.untyped_storage()._cdata: 0 for tensor in inputs}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import weakref

        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._alive:
                    self._alive[key] = storage.nbytes()
                    weakref.finalize(storage, self._alive.pop, key, None)
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [64, 256])
def test_memory_is_that_of_one_chunk(name: Any, tokens: int) -> None:
    vocab, chunk = 3001, 16
    student, teacher = layers(1, tokens, vocab, chunk)
    assert student.weight is not None
    student.hidden.requires_grad_()
    student.weight.requires_grad_()
    assert teacher.weight is not None
    with Memory(student.hidden, student.weight, teacher.hidden, teacher.weight) as seen:
        student.divergence_from(teacher, name, 1.0).sum().backward()
    grads = student.hidden.numel() + student.weight.numel() + 3 * tokens
    stated = (4 if name == "jsd" else 3) * chunk * vocab
    assert seen.peak <= 4 * (grads + 1.3 * stated)


def test_wrong_calls_are_named() -> None:
    student, _ = layers(2, 3, 8, 4)
    logits = OutputLayer(hidden=student.hidden, weight=None, vocab_size=8)
    with pytest.raises(ValueError, match="need hidden states, not logits"):
        student.divergence_from(logits, "jsd", 1.0)
    other = OutputLayer(hidden=student.hidden, weight=student.hidden, vocab_size=8)
    with pytest.raises(ValueError, match="rows for 8 of the vocabulary"):
        student.divergence_from(other, "jsd", 1.0)
