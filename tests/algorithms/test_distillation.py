"""Divergences against sums over the whole vocabulary in float64, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.algorithms.distillation import (
    capped_divergence,
    sampled_token_divergence,
    token_divergence,
    with_tail,
)

NAMES: tuple[Any, ...] = ("reverse_kl", "forward_kl", "jsd")
STUDENT = torch.tensor([0.6, 0.15, 0.1, 0.1, 0.05], dtype=torch.float64)
TEACHER = torch.tensor([0.25, 0.45, 0.1, 0.15, 0.05], dtype=torch.float64)


def by_definition(p: torch.Tensor, q: torch.Tensor, name: str, weight: float) -> torch.Tensor:
    """The divergence of probabilities (V,), term by term."""
    total = torch.zeros((), dtype=torch.float64)
    for one, other in zip(p, q, strict=True):
        mean = (1 - weight) * one + weight * other
        terms = {
            "reverse_kl": one * torch.log(one / other),
            "forward_kl": other * torch.log(other / one),
            "jsd": (1 - weight) * one * torch.log(one / mean)
            + weight * other * torch.log(other / mean),
        }
        total = total + terms[name]
    return total


@pytest.mark.parametrize(
    ("name", "whole", "tailed"),
    [
        ("reverse_kl", 0.319942888, 0.314909010),
        ("forward_kl", 0.336328112, 0.330204813),
        ("jsd", 0.078884164, 0.077505159),
    ],
)
def test_known_values(name: Any, whole: float, tailed: float) -> None:
    found = token_divergence(STUDENT.log(), TEACHER.log(), name)
    assert float(found) == pytest.approx(whole, abs=1e-9)
    parts = with_tail(STUDENT.log()[:2]), with_tail(TEACHER.log()[:2])
    assert float(token_divergence(*parts, name)) == pytest.approx(tailed, abs=1e-9)


@st.composite
def logits(draw: Any) -> tuple[torch.Tensor, torch.Tensor]:
    size = draw(st.integers(2, 9))
    numbers = st.floats(-6, 6, allow_nan=False)
    pair = [draw(st.lists(numbers, min_size=size, max_size=size)) for _ in range(2)]
    return tuple(torch.tensor(one, dtype=torch.float64) for one in pair)  # type: ignore[return-value]


@settings(deadline=None, max_examples=50)
@given(logits(), st.sampled_from(NAMES), st.floats(0.05, 0.95))
def test_values_and_gradients_are_those_of_the_definition(
    pair: tuple[torch.Tensor, torch.Tensor], name: Any, weight: float
) -> None:
    found, wanted = (one.clone().requires_grad_() for one in (pair[0], pair[0]))
    teacher = pair[1].log_softmax(-1)
    value = token_divergence(found.log_softmax(-1), teacher, name, jsd_weight=weight)
    value.backward()
    other = by_definition(wanted.softmax(-1), teacher.exp(), name, weight)
    other.backward()
    torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=50)
@given(logits(), st.sampled_from(NAMES), st.integers(1, 9))
def test_a_tail_is_a_coarser_partition(
    pair: tuple[torch.Tensor, torch.Tensor], name: Any, count: int
) -> None:
    student, teacher = (one.log_softmax(-1) for one in pair)
    whole = float(token_divergence(student, teacher, name))
    parts = with_tail(student[:count]), with_tail(teacher[:count])
    tailed = float(token_divergence(*parts, name))
    assert -1e-9 <= tailed <= whole + 1e-5
    if count >= len(student):
        # The tail is empty, up to its smallest probability.
        assert tailed == pytest.approx(whole, abs=1e-5)


def test_the_sampled_tokens_mean_gradient_is_that_of_the_reverse_kl() -> None:
    generator = torch.Generator().manual_seed(4)
    raw, teacher = torch.randn(2, 7, dtype=torch.float64, generator=generator)
    teacher = teacher.log_softmax(-1)
    drawn_with = torch.randn(7, dtype=torch.float64, generator=generator).log_softmax(-1)
    exact = raw.clone().requires_grad_()
    token_divergence(exact.log_softmax(-1), teacher, "reverse_kl").backward()
    for old in (None, drawn_with):
        sampled = raw.clone().requires_grad_()
        student = sampled.log_softmax(-1)
        terms = sampled_token_divergence(student, teacher, old)
        # Every token as often as it is drawn: by the student, or by other weights before it.
        draws = (student if old is None else old).detach().exp()
        (draws * terms).sum().backward()
        torch.testing.assert_close(sampled.grad, exact.grad, rtol=1e-9, atol=1e-12)


def test_a_cap_scales_value_and_gradient_of_single_tokens() -> None:
    values = torch.tensor([0.5, 3.0, -4.0, 0.0], requires_grad=True)
    capped = capped_divergence(values, 2.0)
    assert capped.tolist() == [0.5, 2.0, -2.0, 0.0]
    capped.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([1.0, 2 / 3, 0.5, 1.0]))
    assert capped_divergence(values, None) is values
