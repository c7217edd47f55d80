"""Formulas of the evaluation against what enumeration, bisection and a count by hand give."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import isnan, sqrt
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.eval.measures import (
    discrimination_rates,
    judgment_counts,
    pass_at_k,
    program_similarity,
    wilson_interval,
)

judgments = st.sampled_from([None, True, False])
judged_programs = st.lists(st.tuples(judgments, st.booleans()), max_size=30)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations(range(n), k))
            share = sum(any(i < c for i in subset) for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_stays_exact_for_many_samples() -> None:
    # The estimator's product form, in floating point.
    product = 1.0
    for i in range(2000 - 10 + 1, 2000 + 1):
        product *= 1.0 - 100 / i
    assert pass_at_k(2000, 10, 100) == pytest.approx(1 - product, rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(0, 0, 1), (3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_pass_at_k_of_nothing_is_an_error(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        pass_at_k(n, c, k)


def rates(judged: Sequence[tuple[bool | None, bool]]) -> dict[str, float]:
    """The rates that have a value."""
    found = discrimination_rates(judgment_counts(judged))
    return {name: float(value) for name, value in found.items() if not isnan(value)}


@given(judged_programs)
def test_f1_is_the_harmonic_mean_of_what_counting_gives(
    judged: list[tuple[bool | None, bool]],
) -> None:
    found = rates(judged)
    f1s = []
    for name, side in (("correct", True), ("incorrect", False)):
        said = [true for judgment, true in judged if judgment is side]
        there = [judgment for judgment, true in judged if true is side]
        hits = sum(true is side for true in said)
        precision = hits / len(said) if said else None
        recall = hits / len(there) if there else None
        assert found.get(f"precision_{name}") == precision
        assert found.get(f"recall_{name}") == recall
        if len({true for _, true in judged}) < 2:  # all programs are right, or all are wrong
            f1 = None
        elif not hits:
            f1 = 0.0
        else:
            assert precision and recall
            f1 = 2 * precision * recall / (precision + recall)
        assert found.get(f"f1_{name}") == (None if f1 is None else pytest.approx(f1))
        f1s.append(f1)
    macro = None if None in f1s else pytest.approx(sum(f for f in f1s if f is not None) / 2)
    assert found.get("f1_macro") == macro


def test_a_table_of_judgments_worked_out_by_hand() -> None:
    judged = [(True, True)] * 6 + [(False, True)] + [(None, True)]
    judged += [(True, False)] * 2 + [(False, False)] * 3 + [(None, False)]
    found = rates(judged)
    assert found["precision_correct"] == 6 / 8 and found["recall_correct"] == 6 / 8
    assert found["precision_incorrect"] == 3 / 4 and found["recall_incorrect"] == 3 / 6
    assert found["f1_correct"] == pytest.approx(0.75)
    assert found["f1_incorrect"] == pytest.approx(0.6)
    assert found["f1_macro"] == pytest.approx(0.675)


def test_a_critic_that_calls_everything_right_has_no_precision_of_wrong() -> None:
    found = rates([(True, True), (True, False)])
    assert "precision_incorrect" not in found
    assert found["recall_incorrect"] == found["f1_incorrect"] == 0.0
    assert found["f1_macro"] == pytest.approx(1 / 3)


@given(st.lists(judged_programs, min_size=1, max_size=4))
def test_counts_of_several_are_rated_at_once(several: list[list[tuple[bool | None, bool]]]) -> None:
    together = discrimination_rates(np.array([judgment_counts(judged) for judged in several]))
    for place, judged in enumerate(several):
        alone = discrimination_rates(judgment_counts(judged))
        for name, value in alone.items():
            assert together[name][place] == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize(
    ("draft", "revision", "expected"),
    [
        ("x = 1", "```python\nx  =  1\n```", 1.0),
        ("a b c d", "a b", 4 / 6),
        ("a b", "c d", 0.0),
        ("", "", 1.0),
        ("f(x)", "f(y)", 6 / 8),
    ],
)
def test_similarity_counts_matching_words(draft: str, revision: str, expected: float) -> None:
    assert program_similarity(draft, revision) == pytest.approx(expected)


@given(st.text(max_size=40), st.text(max_size=40))
def test_similarity_is_a_share_and_1_for_equal_programs(draft: str, revision: str) -> None:
    assert 0.0 <= program_similarity(draft, revision) <= 1.0
    assert program_similarity(draft, draft) == 1.0


@pytest.mark.parametrize(("right", "n"), [(0, 4), (1, 4), (4, 4), (3, 10), (50, 100)])
def test_wilsons_ends_are_shares_that_just_explain_what_was_seen(right: int, n: int) -> None:
    low, high = wilson_interval(right, n, 0.9)
    z = NormalDist().inv_cdf(0.95)

    def end(first: float, last: float) -> float:
        """The share at z standard errors from the observed one, by bisection."""
        for _ in range(100):
            middle = (first + last) / 2
            away = abs(right / n - middle) > z * sqrt(middle * (1 - middle) / n)
            first, last = (middle, last) if away else (first, middle)
        return first

    assert low == pytest.approx(end(0.0, right / n) if right else 0.0, abs=1e-9)
    assert high == pytest.approx(end(1.0, right / n) if right < n else 1.0, abs=1e-9)
