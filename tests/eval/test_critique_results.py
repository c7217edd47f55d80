"""Rates over critiques and the revisions that follow them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from evaluated import chain
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.eval.transcripts import Turn
from ctrl_megatron.eval.validation_rates import validation_rates

programs = st.integers(0, 4)
results = st.builds(lambda *given: one(*given), st.sampled_from("CI-"), programs, programs)


def one(said: str, before: int, after: int) -> Turn:
    return chain("p", said, (before, after))[0]


def test_a_table_worked_out_by_hand() -> None:
    found = validation_rates([one("I", 2, 4), one("C", 4, 0), one("-", 0, 0)])
    third = pytest.approx(1 / 3)
    assert found["valid_critique_rate"] == pytest.approx(2 / 3)
    assert found["judgment_accuracy"] == pytest.approx(2 / 3)  # no judgment counts as wrong
    assert found["pass_rate_before"] == pytest.approx(0.5)
    assert found["revision_pass_rate"] == third
    assert found["solved_before"] == found["solved_after"] == third
    assert found["to_right"] == found["to_wrong"] == third
    assert found["rounds"] == 3.0


@given(st.lists(results, min_size=1))
def test_turns_explain_the_difference_of_solved_problems(played: list[Turn]) -> None:
    found = validation_rates(played)
    turned = found["to_right"] - found["to_wrong"]
    assert found["solved_after"] - found["solved_before"] == pytest.approx(turned)
    assert all(0 <= value <= 1 for name, value in found.items() if name != "rounds")
    assert found["judgment_accuracy"] <= found["valid_critique_rate"]


def test_what_could_not_be_judged_is_left_out_and_counted() -> None:
    known = [one("I", 2, 4), one("C", 4, 0)]
    lost = [replace(one("C", 0, 4), before=None), replace(one("C", 4, 0), after=None)]
    assert validation_rates([*known, *lost]) == {**validation_rates(known), "unjudged": 2.0}
    assert "unjudged" not in validation_rates(known)
    assert validation_rates(lost) == {"rounds": 0.0, "unjudged": 2.0}


def test_nothing_to_summarise_is_an_error() -> None:
    with pytest.raises(ValueError, match="no critique"):
        validation_rates([])


def test_rows_that_one_of_several_revisions_solves() -> None:
    chains = {"a": (4, 0, 4), "b": (0, 3, 0), "c": (0, 0, 4)}
    turns = [
        replace(one("C", 0, passed), attempt=row, sample=number)
        for row, after in chains.items()
        for number, passed in enumerate(after)
    ]
    assert validation_rates(turns)["pass@3"] == 2 / 3
    lost = [replace(t, after=None) if t.attempt == "c" else t for t in turns]
    assert validation_rates(lost)["pass@3"] == 1 / 2
    assert "pass@1" not in validation_rates([one("C", 0, 4)])
