"""Rates over rounds of critique and revision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.eval.critique_revision import Round, summarise

rates = st.integers(0, 4).map(lambda quarters: quarters / 4)
rounds = st.builds(
    lambda judged, before, after: Round(
        valid=judged is not None,
        judged_correct=judged,
        passed_before=before == 1,
        pass_rate_before=before,
        passed_after=after == 1,
        pass_rate_after=after,
    ),
    st.sampled_from([None, True, False]),
    rates,
    rates,
)


def test_a_table_worked_out_by_hand() -> None:
    def one(judged: bool | None, before: float, after: float) -> Round:
        return Round(
            valid=judged is not None,
            judged_correct=judged,
            passed_before=before == 1,
            pass_rate_before=before,
            passed_after=after == 1,
            pass_rate_after=after,
        )

    found = summarise([one(False, 0.5, 1.0), one(True, 1.0, 0.0), one(None, 0.0, 0.0)])
    third = pytest.approx(1 / 3)
    assert found["valid_critique_rate"] == pytest.approx(2 / 3)
    assert found["judgment_accuracy"] == pytest.approx(2 / 3)  # no judgment counts as wrong
    assert found["pass_rate_before"] == pytest.approx(0.5)
    assert found["revision_pass_rate"] == third
    assert found["solved_before"] == found["solved_after"] == third
    assert found["to_right"] == found["to_wrong"] == third
    assert found["rounds"] == 3.0


@given(st.lists(rounds, min_size=1))
def test_turns_explain_the_difference_of_solved_problems(played: list[Round]) -> None:
    found = summarise(played)
    turned = found["to_right"] - found["to_wrong"]
    assert found["solved_after"] - found["solved_before"] == pytest.approx(turned)
    assert all(0 <= value <= 1 for name, value in found.items() if name != "rounds")
    assert found["judgment_accuracy"] <= found["valid_critique_rate"]


def test_nothing_to_summarise_is_an_error() -> None:
    with pytest.raises(ValueError, match="no round"):
        summarise([])
