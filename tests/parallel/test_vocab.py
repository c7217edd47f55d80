from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ctrl_megatron.parallel import vocab
from ctrl_megatron.parallel.vocab import linear_log_probs, vocab_range

HIDDEN = 7


def inputs(seed: int, tokens: int, vocab: int, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator) * scale
    weight = torch.randn(vocab, HIDDEN, generator=generator)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    upstream = torch.randn(2, tokens, generator=generator)
    return hidden, weight, targets, upstream


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def with_gradients(function: Any, hidden: torch.Tensor, weight: torch.Tensor, upstream: Any) -> Any:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropy = function(hidden, weight)
    (log_probs * upstream[0] + entropy * upstream[1]).sum().backward()
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**31 - 1),
    st.integers(0, 12),
    st.integers(1, 40),
    st.integers(1, 13),
    st.sampled_from([0.3, 0.7, 1.0, 2.5]),
)
def test_values_and_gradients_equal_the_naive_formula_in_float64(
    seed: int, tokens: int, vocab: int, chunk: int, temperature: float
) -> None:
    hidden, weight, targets, upstream = inputs(seed, tokens, vocab)
    got = with_gradients(
        lambda h, w: linear_log_probs(
            h, w, targets, vocab_size=vocab, temperature=temperature, chunk=chunk
        ),
        hidden,
        weight,
        upstream,
    )
    want = with_gradients(
        lambda h, w: naive(h, w, targets, temperature),
        hidden.double(),
        weight.double(),
        upstream.double(),
    )
    for left, right in zip(got, want, strict=True):
        assert left.dtype == torch.float32
        torch.testing.assert_close(left.double(), right, rtol=2e-5, atol=2e-5)


def test_the_chunk_size_changes_no_value() -> None:
    hidden, weight, targets, upstream = inputs(3, 50, 101)
    results = [
        with_gradients(
            lambda h, w, chunk=chunk: linear_log_probs(h, w, targets, vocab_size=101, chunk=chunk),
            hidden,
            weight,
            upstream,
        )
        for chunk in (1, 7, 50, 1024)
    ]
    for result in results[1:]:
        for left, right in zip(result, results[0], strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_central_differences_agree_with_the_backward_pass() -> None:
    # Outputs are float32 also for float64 inputs, so the steps are larger than gradcheck's own.
    hidden, weight, targets, upstream = (
        x.double() if x.is_floating_point() else x for x in inputs(11, 5, 9)
    )

    def total(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        log_probs, entropy = linear_log_probs(h, w, targets, vocab_size=9, temperature=0.8, chunk=2)
        return (log_probs * upstream[0] + entropy * upstream[1]).sum()

    assert torch.autograd.gradcheck(
        total,
        (hidden.requires_grad_(), weight.requires_grad_()),
        eps=1e-2,
        atol=2e-3,
        rtol=2e-3,
        nondet_tol=1e-6,
    )


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_the_two_results_may_be_left_out_of_the_loss(which: int) -> None:
    hidden, weight, targets, upstream = inputs(4, 6, 8)
    upstream[1 - which] = 0
    grads = []
    for alone in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        results = linear_log_probs(h, w, targets, vocab_size=8)
        terms = [r * u for r, u in zip(results, upstream, strict=True)]
        (terms[which] if alone else terms[0] + terms[1]).sum().backward()
        grads.append((h.grad, w.grad))
    torch.testing.assert_close(grads[0], grads[1])


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, targets, upstream = inputs(5, 8, 30, scale=1e4)
    results = with_gradients(
        lambda h, w: linear_log_probs(h, w, targets, vocab_size=30), hidden, weight, upstream
    )
    assert all(torch.isfinite(r).all() for r in results)
    want = naive(hidden.double(), weight.double(), targets, 1.0)[0]
    torch.testing.assert_close(results[0].double(), want, rtol=1e-5, atol=1e-2)


def test_bfloat16_keeps_its_gradient_dtype_and_float32_results() -> None:
    hidden, weight, targets, upstream = inputs(6, 40, 64)
    low = with_gradients(
        lambda h, w: linear_log_probs(h, w, targets, vocab_size=64, chunk=9),
        hidden.bfloat16(),
        weight.bfloat16(),
        upstream,
    )
    assert [r.dtype for r in low] == [torch.float32] * 2 + [torch.bfloat16] * 2
    want = with_gradients(
        lambda h, w: naive(h, w, targets, 1.0),
        hidden.bfloat16().double(),
        weight.bfloat16().double(),
        upstream.double(),
    )
    for left, right in zip(low, want, strict=True):
        gap = (left.double() - right).norm() / right.norm()
        assert gap < 0.01


class LargestResult(TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_logits_of_one_chunk_exist_at_a_time() -> None:
    tokens, vocab, chunk = 200, 300, 10
    hidden, weight, targets, upstream = inputs(7, tokens, vocab)
    with LargestResult() as seen:
        with_gradients(
            lambda h, w: linear_log_probs(h, w, targets, vocab_size=vocab, chunk=chunk),
            hidden,
            weight,
            upstream,
        )
    assert seen.elements <= chunk * vocab


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out)
        return func(*args, **(kwargs or {}))


def test_logits_that_fit_into_a_chunk_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, tiles = 40, 15
    hidden, weight, targets, upstream = inputs(13, tokens, 300)
    low = [tensor.bfloat16() for tensor in (hidden, weight)]
    monkeypatch.setattr(vocab, "_LOGITS", 20 * tokens)
    monkeypatch.setattr(vocab, "_COLUMNS", 20)

    def results(chunk: int) -> tuple[list[torch.Tensor], int]:
        with Products() as seen:
            found = with_gradients(
                lambda h, w: linear_log_probs(h, w, targets, vocab_size=300, chunk=chunk),
                *low,
                upstream,
            )
        return found, seen.count

    # The bytes of a chunk in float32, less one token.
    (kept, products), (anew, more) = results(tokens // 2), results(tokens // 2 - 1)
    assert (products, more) == (3 * tiles, 4 * tiles)
    for left, right in zip(kept, anew, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize("chunk", [8, 40])
@pytest.mark.parametrize("cached", [16, 512])
@pytest.mark.parametrize("is_embedding", [False, True])
def test_tiles_of_any_size_and_megatrons_buffer_give_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, chunk: int, cached: int, is_embedding: bool
) -> None:
    hidden, weight, targets, upstream = inputs(12, 40, 300)
    wanted = with_gradients(
        lambda h, w: naive(h, w, targets, 1.0), hidden.double(), weight.double(), upstream.double()
    )
    monkeypatch.setattr(vocab, "_LOGITS", cached)
    monkeypatch.setattr(vocab, "_COLUMNS", 16)
    hidden.requires_grad_()
    weight.requires_grad_()
    # Values left over from another micro-batch.
    weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    log_probs, entropy = linear_log_probs(
        hidden, weight, targets, vocab_size=300, chunk=chunk, is_embedding=is_embedding
    )
    (log_probs * upstream[0] + entropy * upstream[1]).sum().backward()
    # An embedding's own gradient is still to be added; else Megatron's hook looks at the mark.
    assert (weight.grad is None) == is_embedding
    assert getattr(weight, "grad_added_to_main_grad", False) != is_embedding
    buffer = weight.main_grad - 1  # type: ignore[attr-defined]
    for left, right in zip((log_probs, entropy, hidden.grad, buffer), wanted, strict=True):
        torch.testing.assert_close(left.double(), right, rtol=2e-5, atol=2e-5)


@given(st.integers(1, 200), st.integers(1, 9))
def test_shares_of_the_vocabulary_are_equal_and_cover_it_once(vocab: int, size: int) -> None:
    ids: list[int] = []
    for rank in range(size):
        first, real, padded = vocab_range(vocab, rank, size)
        assert padded * size - vocab in range(size)
        assert 0 <= real <= padded
        assert first == rank * padded
        ids += range(first, first + real)
    assert ids == list(range(vocab))


def test_padded_columns_are_never_predicted_and_get_no_gradient() -> None:
    # Without a group the softmax of the last rank runs over its own real columns alone.
    first, real, padded = vocab_range(101, 2, 3)
    assert (first, real, padded) == (68, 33, 34)
    hidden, weight, _, upstream = inputs(8, 6, padded)
    targets = torch.arange(6) + first
    alone = with_gradients(
        lambda h, w: linear_log_probs(h, w, targets, vocab_size=101, tensor_rank=2, tensor_size=3),
        hidden,
        weight,
        upstream,
    )
    want = with_gradients(
        lambda h, w: naive(h, w[:real], targets - first, 1.0), hidden, weight, upstream
    )
    for left, right in zip(alone, want, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    assert torch.all(alone[3][real:] == 0)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"vocab_size": 9}, "8 rows, rank 0 of 1 owns 9 of a vocabulary of 9"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": float("nan")}, "temperature must be positive"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"chunk": -4}, "chunk must be at least 1"),
        ({"targets": torch.zeros(1, dtype=torch.int64)}, "3 hidden states for 1 targets"),
    ],
)
def test_wrong_calls_are_named(changes: dict[str, Any], complaint: str) -> None:
    hidden, weight, targets, _ = inputs(9, 3, 8)
    arguments = {"targets": targets, "vocab_size": 8, **changes}
    with pytest.raises(ValueError, match=complaint):
        linear_log_probs(hidden, weight, **arguments)
