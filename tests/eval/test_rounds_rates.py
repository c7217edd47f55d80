"""Rates of rounds, and of single rounds of as many tokens, against naive counts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import combinations
from statistics import mean

import pytest
from evaluated import SAID, chain
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.eval.rates import RATES
from ctrl_megatron.eval.results import evaluate_turns
from ctrl_megatron.eval.rounds import ROUNDS
from ctrl_megatron.eval.tables import report_tables

TURNS = 3
Script = tuple[str, tuple[int, ...]]


@st.composite
def problems(draw: st.DrawFn) -> list[list[Script]]:
    """For every problem, three chains of one first solution: what is said, and quarters of tests
    that pass."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, 4))
        scripts = []
        for _ in range(3):
            said = draw(st.text("CI-", min_size=TURNS, max_size=TURNS))
            later = draw(st.tuples(*[st.integers(0, 4)] * TURNS))
            scripts.append((said, (first, *later)))
        found.append(scripts)
    return found


@given(problems())
@settings(max_examples=60, deadline=None)
def test_rates_of_rounds_are_naive_counts(scripts: list[list[Script]]) -> None:
    turns = [
        turn
        for number, of_problem in enumerate(scripts)
        for sample, (said, passed) in enumerate(of_problem)
        for turn in chain(f"p{number}", said, passed, sample=sample)
    ]
    (result,) = evaluate_turns(turns, draws=10)
    # Every turn costs as much as the first, so that n turns are worth n single rounds.
    assert result.single_rounds == (1, 2, 3)
    for n in range(1, TURNS + 1):
        wanted: dict[str, list[float]] = {name: [] for name in ROUNDS}
        for of_problem in scripts:
            stops = [next((i for i in range(n) if SAID[s[i]]), None) for s, _ in of_problem]
            kept = [
                None if i is None else passed[i] == 4
                for i, (_, passed) in zip(stops, of_problem, strict=True)
            ]
            after = [passed for _, passed in of_problem]
            wanted["undone"].append(mean(p[n - 1] == 4 and p[n] < 4 for p in after))
            wanted["stopped_right"].append(mean(right is True for right in kept))
            wanted["stopped_wrong"].append(mean(right is False for right in kept))
            wanted["over_first_turn"].append(mean((p[n] == 4) - (p[1] == 4) for p in after))
            wanted["tokens"].append(30.0 * n)
            # Every subset of n first revisions; equal programs have equal verdicts here.
            majority, some = [], []
            for subset in combinations([p[1] for p in after], n):
                counts = Counter(subset)
                most = [value for value, c in counts.items() if c == max(counts.values())]
                majority.append(mean(float(value == 4) for value in most))
                some.append(float(4 in subset))
            wanted["majority_of_n"].append(mean(majority))
            wanted["any_of_n"].append(mean(some))
        rates = result.curves[n]
        for name, values in wanted.items():
            assert rates[name].value == pytest.approx(mean(values)), (n, name)
    (table,) = (t for t in report_tables([result]) if t.title == "Rounds")
    assert [row[1] for row in table.rows] == ["1", "2", "3"]


def test_fewer_chains_than_single_rounds_have_no_rate() -> None:
    turns = [*chain("p", "II", (0, 4, 0)), *chain("q", "II", (0, 0, 4))]
    (result,) = evaluate_turns(turns, draws=10)
    assert result.single_rounds == (1, 0)
    assert "any_of_n" in result.curves[1] and "any_of_n" not in result.curves[2]
    (table,) = (t for t in report_tables([result]) if t.title == "Rounds")
    assert table.rows[1][-3:] == ["-", "-", "-"]


def test_turns_that_cost_more_are_worth_more_single_rounds() -> None:
    turns = [t for s in range(3) for t in chain("p", "II", (0, 4, 0), sample=s)]
    costly = [t if t.turn == 1 else dataclasses.replace(t, critique_tokens=50) for t in turns]
    (result,) = evaluate_turns(costly, draws=10)
    assert result.single_rounds == (1, 3)


def test_one_turn_has_no_rounds() -> None:
    (result,) = evaluate_turns(chain("p", "I", (0, 4)), draws=10)
    assert not set(ROUNDS) & result.curves[1].keys()
    assert not any(t.title == "Rounds" for t in report_tables([result]))
    assert set(ROUNDS) <= RATES.keys()
