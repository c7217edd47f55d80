"""Scores of first solutions: their measures beside brute force, their kinds, their reports."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise
from statistics import mean

import numpy as np
import pytest
from evaluated import chain
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.eval.measures import discrimination_rates, judgment_counts
from ctrl_megatron.eval.results import evaluate_turns
from ctrl_megatron.eval.scores import (
    SCORE_STATISTICS,
    ScoredSolution,
    best_of_n,
    reliability,
    roc_curve,
    score_cells,
    scored_solutions,
)
from ctrl_megatron.eval.validation_rates import validation_rates

GRID = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
SCORES = st.lists(st.tuples(GRID, st.booleans()), min_size=1, max_size=12)


def scored(
    pairs: list[tuple[float, bool]], programs: list[str] | None = None
) -> list[ScoredSolution]:
    """Candidates of one problem: (score, right) each."""
    texts = programs or [f"program {number}" for number in range(len(pairs))]
    return [
        ScoredSolution(
            seed=0, problem="p", attempt=f"p/{n}", solution=text, score=score, right=right
        )
        for n, ((score, right), text) in enumerate(zip(pairs, texts, strict=True))
    ]


def measured(pairs: list[tuple[float, bool]]) -> dict[str, float]:
    cells = score_cells(scored(pairs), [0], ["p"])
    return {
        name: float(SCORE_STATISTICS[name](part.sum(axis=(0, 1)))) for name, part in cells.items()
    }


def auc(pairs: list[tuple[float, bool]]) -> float:
    against = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, right in pairs
        for b, other in pairs
        if right and not other
    ]
    return mean(against) if against else math.nan


def ece(pairs: list[tuple[float, bool]]) -> float:
    total = 0.0
    for number in range(10):
        low, high = number / 10, (number + 1) / 10
        inside = [p for p in pairs if low < p[0] <= high or (number == 0 and p[0] == 0.0)]
        if inside:
            gap = mean(s for s, _ in inside) - mean(float(right) for _, right in inside)
            total += len(inside) * abs(gap)
    return total / len(pairs)


@given(SCORES)
def test_measures_equal_brute_force(pairs: list[tuple[float, bool]]) -> None:
    brier = mean((score - right) ** 2 for score, right in pairs)
    found = measured(pairs)
    assert found == pytest.approx(
        {"auc": auc(pairs), "ece": ece(pairs), "brier": brier}, nan_ok=True
    )
    points = roc_curve(scored(pairs))
    assert bool(points) == (len({right for _, right in pairs}) == 2)
    if points:
        assert points[0] == (0.0, 0.0) and points[-1] == (1.0, 1.0)
        steps = pairwise(points)
        area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in steps)
        assert area == pytest.approx(found["auc"])
    assert sum(count for *_, count in reliability(scored(pairs))) == len(pairs)


def test_measures_of_the_reference_vector() -> None:
    labels, scores = (1, 0, 1, 0, 0, 1), (0.9, 0.2, 0.4, 0.6, 0.1, 0.8)
    found = measured([(score, bool(label)) for score, label in zip(scores, labels, strict=True)])
    assert found["auc"] == pytest.approx(0.888889, abs=1e-6)
    assert found["ece"] == pytest.approx(0.3)
    judged = [(score > 0.5, bool(label)) for score, label in zip(scores, labels, strict=True)]
    rates = discrimination_rates(judgment_counts(judged))
    for name in ("f1_correct", "f1_incorrect", "f1_macro"):
        assert float(rates[name]) == pytest.approx(2 / 3)


@given(st.data(), st.integers(1, 4))
def test_best_of_n_equals_all_subsets(data: st.DataObject, n: int) -> None:
    pairs = data.draw(st.lists(st.tuples(GRID, st.booleans()), min_size=n, max_size=7))
    texts = data.draw(st.lists(st.sampled_from("abc"), min_size=len(pairs), max_size=len(pairs)))
    candidates = scored(pairs, texts)
    wanted: dict[str, list[float]] = {
        name: [] for name in ("random", "majority", "critic", "oracle")
    }
    for subset in combinations(candidates, n):
        top = max(one.score for one in subset)
        counts = [sum(other.solution == one.solution for other in subset) for one in subset]
        wanted["random"].append(mean(float(one.right) for one in subset))
        wanted["critic"].append(mean(float(one.right) for one in subset if one.score == top))
        wanted["oracle"].append(float(any(one.right for one in subset)))
        wanted["majority"].append(
            mean(
                float(one.right)
                for one, count in zip(subset, counts, strict=True)
                if count == max(counts)
            )
        )
    assert best_of_n(candidates, n) == pytest.approx({k: mean(v) for k, v in wanted.items()})


def test_a_score_is_the_share_of_votes_or_the_mean_probability() -> None:
    turns = [
        *chain("p", "C", (4, 4), confidence=0.9),
        *chain("p", "I", (4, 4), sample=1, confidence=0.3),
        *chain("p", "C", (4, 4), sample=2, confidence=0.6),
        *chain("p", "-", (4, 4), sample=3),
        *chain("q", "-", (0, 4)),
    ]
    votes = {one.problem: one.score for one in scored_solutions(turns, "votes")}
    assert votes == pytest.approx({"p": 2 / 3, "q": 0.5})
    probabilities = {one.problem: one.score for one in scored_solutions(turns, "logprob")}
    assert probabilities == pytest.approx({"p": 0.6, "q": 0.5})
    # Of written critiques nothing is known, and a guess would be another critic's.
    unknown = [*turns, *chain("r", "C", (4, 4))]
    assert scored_solutions(unknown, "logprob") == []
    assert len(scored_solutions(unknown, "votes")) == 3


def test_results_have_the_measures_with_intervals_and_paired_gains() -> None:
    rng = np.random.default_rng(0)
    turns = []
    for critic, skill in (("coin", 0.0), ("judge", 0.4)):
        for number in range(40):
            right = number % 2 == 0
            score = float(np.clip(0.5 + (skill if right else -skill) + rng.normal(0, 0.2), 0, 1))
            for sample in range(2):
                turns += chain(
                    f"p{number}",
                    "C" if score > 0.5 else "I",
                    (4 if right else 0, 4),
                    critic=critic,
                    sample=sample,
                    confidence=score,
                )
    coin, judge = evaluate_turns(turns, confidence="logprob")
    assert abs(coin.last_turn_rates["auc"].value - 0.5) < 0.2
    found = judge.last_turn_rates["auc"]
    assert found.low is not None and found.high is not None
    assert 0.9 < found.low <= found.value <= found.high <= 1
    gain = judge.gains["auc"]
    assert gain.low is not None and gain.low > 0
    assert judge.gains["brier"].value < 0
    by_votes = evaluate_turns(turns)[1]
    assert by_votes.confidence == "votes" and by_votes.last_turn_rates["ece"].value < 0.1
    helped = judge.last_turn_rates["gain_after_true_judgment"]
    assert helped.value == pytest.approx(0.5, abs=0.06)


def test_best_of_n_is_reported_where_every_problem_has_n_first_solutions() -> None:
    turns = []
    for problem in ("p", "q"):
        for number, right in enumerate((True, False, False, True)):
            said = "C" if right else "I"
            turns += chain(
                problem,
                said,
                (4 if right else 0, 4),
                attempt=f"{problem}/{number}",
                solution=f"answer {number}",
            )
    (result,) = evaluate_turns(turns)
    assert sorted(result.best_of) == [2, 4]
    assert result.best_of[2]["critic"].value == pytest.approx(5 / 6)
    assert result.best_of[2]["oracle"].value == pytest.approx(5 / 6)
    assert result.best_of[4]["random"].value == pytest.approx(0.5)
    (single,) = evaluate_turns(chain("p", "C", (4, 4)))
    assert single.best_of == {} and single.roc == ()


def test_validation_has_the_measures_that_exist() -> None:
    turns = [*chain("p", "C", (4, 4), confidence=0.8), *chain("q", "I", (0, 4), confidence=0.1)]
    rates = validation_rates(turns)
    assert rates["auc"] == 1.0 and rates["f1_macro"] == 1.0
    assert rates["brier"] == pytest.approx((0.04 + 0.01) / 2)
    later = [replace(turn, seed=7) for turn in turns]
    assert validation_rates(later) == rates
    one_class = validation_rates(chain("p", "C", (4, 4)))
    assert not {"auc", "f1_macro", "brier"} & one_class.keys()
