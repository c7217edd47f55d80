from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.rewards.ablations import (
    PAPER,
    TransitionTable,
    added,
    judgment_reward,
    judgment_rewards,
    transition_reward,
    transition_rewards,
    truth_of,
)

TABLE = TransitionTable(
    wrong_to_right=1.0, right_to_right=0.7, right_to_wrong=-1.0, wrong_to_wrong=-0.1
)
known = st.sampled_from([True, False, None])


@pytest.mark.parametrize(
    ("judgment", "truth", "reward"),
    [
        (True, True, 0.25),
        (False, False, 0.25),
        (True, False, 0.0),
        (False, True, 0.0),
        (None, True, 0.0),
        (None, None, 0.0),
        (True, None, None),
        (False, None, None),
    ],
)
def test_a_true_judgment_earns_the_weight(
    judgment: bool | None, truth: bool | None, reward: float | None
) -> None:
    assert judgment_reward(judgment, truth, 0.25) == reward


@given(known, known)
def test_without_a_weight_there_is_no_term(judgment: bool | None, truth: bool | None) -> None:
    assert judgment_reward(judgment, truth, 0.0) == 0.0


@pytest.mark.parametrize(
    ("before", "after", "reward"),
    [
        (False, True, 1.0),
        (True, True, 0.7),
        (True, False, -1.0),
        (False, False, -0.1),
        (None, True, None),
        (True, None, None),
        (None, None, None),
    ],
)
def test_every_transition_has_its_reward(
    before: bool | None, after: bool | None, reward: float | None
) -> None:
    assert transition_reward(before, after, TABLE) == reward


@given(st.booleans(), st.booleans())
def test_the_papers_table_sees_only_the_verdict_afterwards(before: bool, after: bool) -> None:
    assert transition_reward(before, after, PAPER) == float(after)


@given(st.lists(st.tuples(known, known)), st.floats(-5, 5))
def test_lists_are_rows(rows: list[tuple[bool | None, bool | None]], weight: float) -> None:
    first, second = [a for a, _ in rows], [b for _, b in rows]
    assert judgment_rewards(first, second, weight) == [
        judgment_reward(a, b, weight) for a, b in rows
    ]
    assert transition_rewards(first, second, TABLE) == [
        transition_reward(a, b, TABLE) for a, b in rows
    ]


def test_lists_of_unequal_length_are_refused() -> None:
    for call in (
        lambda: judgment_rewards([True], [], 1.0),
        lambda: transition_rewards([True], [], TABLE),
        lambda: added([1.0], []),
    ):
        with pytest.raises(ValueError, match="shorter"):
            call()


def test_terms_are_added_where_both_are_known() -> None:
    assert added([1.0, None, 0.5], [0.25, 0.25, None]) == [1.25, None, None]


def test_a_table_from_a_mapping_names_what_is_wrong() -> None:
    values = {"wrong_to_right": 1, "right_to_right": 1, "right_to_wrong": 0, "wrong_to_wrong": 0}
    assert TransitionTable.from_mapping(values) == PAPER
    with pytest.raises(ValueError, match="wrong_to_left"):
        TransitionTable.from_mapping({**values, "wrong_to_left": 0})
    with pytest.raises(ValueError, match="right_to_wrong"):
        TransitionTable.from_mapping({k: v for k, v in values.items() if k != "right_to_wrong"})
    with pytest.raises(ValueError, match="finite"):
        TransitionTable.from_mapping({**values, "wrong_to_wrong": math.nan})


def test_a_solution_is_right_if_every_test_passes() -> None:
    assert [truth_of(rate) for rate in (1.0, 0.99, 0.0, None)] == [True, False, False, None]
