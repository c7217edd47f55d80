"""Overlong punishment, judgment and transition: rewards beyond the program itself."""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_samples import CORRECT, INCORRECT, function_row

from ctrl_megatron.algorithms import get_adv_estimator
from ctrl_megatron.rewards import RewardItem, RewardOutcome, make_reward
from ctrl_megatron.rewards.shaping import soft_overlong_punishment
from ctrl_megatron.types import Verdict

TABLE = {
    "wrong_to_right": 1.0,
    "right_to_right": 0.7,
    "right_to_wrong": -1.0,
    "wrong_to_wrong": -0.1,
}


def rewards(function: Any, *items: RewardItem) -> list[float | None]:
    return asyncio.run(function(list(items)))


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (15, -0.75), (16, -1.0), (99, -1.0)],
)
def test_soft_overlong_punishment(length: int, penalty: float) -> None:
    assert soft_overlong_punishment(length, max_length=16, cache_length=4) == penalty
    function = make_reward("soft_overlong_punishment", max_length=16, cache_length=4)
    assert rewards(function, RewardItem(text="", length=length)) == [penalty]


def test_soft_overlong_punishment_names_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="cache_length"):
        make_reward("soft_overlong_punishment", max_length=4, cache_length=5)
    function = make_reward("soft_overlong_punishment", max_length=4, cache_length=2)
    with pytest.raises(ValueError, match="length"):
        rewards(function, RewardItem(text=""))


@pytest.mark.parametrize(
    ("critique", "pass_rate", "reward"),
    [
        (CORRECT, 1.0, 1.0),
        (INCORRECT, 0.99, 1.0),
        (CORRECT, 0.0, 0.0),
        (INCORRECT, 1.0, 0.0),
        ("no judgment", 1.0, 0.0),
        ("no judgment", 0.0, 0.0),
    ],
)
def test_a_true_judgment_earns_one(critique: str, pass_rate: float, reward: float) -> None:
    item = RewardItem(text="", critique=critique, row=function_row(pass_rate=pass_rate))
    assert rewards(make_reward("judge"), item) == [reward]


@pytest.mark.parametrize(
    ("critique", "pass_rate", "correct_if", "reward", "gate"),
    [
        (CORRECT, 1.0, 1.0, 0.7, 0.0),
        (CORRECT, 0.9, 1.0, -1.0, 1.0),
        (CORRECT, 0.9, 0.8, 0.7, 0.0),
        (CORRECT, 0.8, 0.8, 0.7, 0.0),  # at least this share
        (INCORRECT, 0.9, 0.8, -1.0, 1.0),
        (INCORRECT, 0.0, 0.8, 0.7, 0.0),
        ("no judgment", 0.0, 1.0, -0.3, 1.0),
    ],
)
def test_judgments_have_the_configured_values(
    critique: str, pass_rate: float, correct_if: float, reward: float, gate: float
) -> None:
    item = RewardItem(text="", critique=critique, row=function_row(pass_rate=pass_rate))
    values = {"right": 0.7, "wrong": -1.0, "unreadable": -0.3, "correct_if": correct_if}
    assert rewards(make_reward("judge", **values), item) == [reward]
    assert rewards(make_reward("judge_gate", correct_if=correct_if), item) == [gate]


@pytest.mark.parametrize(
    ("run_all_cases", "before", "earned", "change"),
    [
        (True, 0.25, 1.0, 0.75),
        (True, 1.0, 0.5, -0.5),
        (True, 0.25, 0.0, -0.25),
        (False, 0.25, 1.0, 1.0),
        (False, 1.0, 0.0, -1.0),
        (True, 0.25, None, None),
    ],
)
def test_delta_is_the_critics_reward_less_the_first_solutions(
    run_all_cases: bool, before: float, earned: float | None, change: float | None
) -> None:
    outcome = RewardOutcome(reward=earned)
    row = function_row(pass_rate=before)
    item = RewardItem(text="", critique=CORRECT, row=row, outcome=outcome)
    assert rewards(make_reward("delta", run_all_cases=run_all_cases), item) == [change]


GROUPED = {
    "grpo": {},
    "rloo": {},
    "opo": {},
    "reinforce_plus_plus_baseline": {},
    "cpgd": {"weight_factor_in_cpgd": "naive"},
}


@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=6),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from(sorted(GROUPED)),
)
def test_delta_has_the_advantages_of_critic_in_a_group_of_one_program(
    after: list[float], before: float, estimator: str
) -> None:
    """A constant less changes no baseline within the group."""
    earned = torch.tensor(after, dtype=torch.float64)
    both = [
        advantages_of(estimator, score, **GROUPED[estimator]) for score in (earned, earned - before)
    ]
    torch.testing.assert_close(both[0], both[1], rtol=1e-6, atol=1e-6)


@given(
    st.lists(st.booleans(), min_size=2, max_size=8),
    st.booleans(),
    st.floats(0.1, 2),
    st.floats(-1, 0),
)
def test_a_transition_table_acts_only_where_nothing_divides_by_the_deviation(
    after: list[bool], before: bool, gain: float, loss: float
) -> None:
    """Within a group of one program a table is an increasing function of the revision's verdict:
    divided by the deviation it is the critic's reward, and otherwise the group's weight."""
    earned = torch.tensor(after, dtype=torch.float64)
    row = (gain, loss) if before else (gain / 2, loss / 3)
    table = torch.where(earned > 0, row[0], row[1]).double()
    divided = [advantages_of("grpo", score) for score in (earned, table)]
    torch.testing.assert_close(divided[0], divided[1], rtol=1e-4, atol=1e-4)
    plain = [advantages_of("rloo", score) for score in (earned, table)]
    torch.testing.assert_close(plain[0] * (row[0] - row[1]), plain[1], rtol=1e-6, atol=1e-6)


def advantages_of(estimator: str, scores: torch.Tensor, **options: Any) -> torch.Tensor:
    """(B,): the advantages of the rows of one group."""
    found, _ = get_adv_estimator(estimator)(
        token_level_rewards=scores[:, None],
        response_mask=torch.ones(len(scores), 1, dtype=torch.bool),
        index=["one program"] * len(scores),
        **options,
    )
    return found[:, 0]


def transition(
    critique: str, before: float, passed: tuple[bool, ...] | None, **values: float
) -> float | None:
    verdict = None if passed is None else Verdict(passed=passed, total=2)
    item = RewardItem(
        text="",
        critique=critique,
        row=function_row(pass_rate=before),
        outcome=RewardOutcome(reward=None, verdict=verdict),
    )
    return rewards(make_reward("transition", **values), item)[0]


@pytest.mark.parametrize(
    ("before", "after", "reward"),
    [
        (0.5, (True, True), 1.0),
        (1.0, (True, True), 0.7),
        (1.0, (True, False), -1.0),
        (0.0, (False,), -0.1),
        (1.0, None, None),
    ],
)
def test_every_transition_has_its_reward(
    before: float, after: tuple[bool, ...] | None, reward: float | None
) -> None:
    assert transition(CORRECT, before, after, **TABLE) == reward
    assert transition("no judgment", before, None, **TABLE) == 0.0  # nothing was revised


@pytest.mark.parametrize(
    ("before", "after", "hundredth", "tenth"),
    [
        # Computed in float64 from the formula of ECHO (arXiv 2601.06794).
        (0.0, 0.5, 0.683295, 0.606136),
        (0.5, 1.0, 3.931826, 1.791759),
        (0.8, 1.0, 3.044522, 1.098612),
        (0.8, 0.6, -0.669050, -0.510826),
        (0.0, 1.0, 4.615121, 2.397895),
        (0.3, 0.3, 0.0, 0.0),
    ],
)
def test_echo_gain(before: float, after: float, hundredth: float, tenth: float) -> None:
    item = RewardItem(
        text="",
        row=function_row("f", pass_rate=before),
        critique=INCORRECT,
        outcome=RewardOutcome(reward=after),
    )
    assert rewards(make_reward("echo_gain", eta=0.01), item) == [pytest.approx(hundredth, abs=1e-6)]
    assert rewards(make_reward("echo_gain"), item) == [pytest.approx(tenth, abs=1e-6)]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6), st.floats(1e-3, 1))
def test_echo_gains_of_a_chain_add_up(rates: list[float], eta: float) -> None:
    function = make_reward("echo_gain", eta=eta)

    def gain(before: float, after: float) -> float:
        row = function_row("f", pass_rate=before)
        (found,) = rewards(
            function, RewardItem(text="", row=row, outcome=RewardOutcome(reward=after))
        )
        assert found is not None
        return found

    chain = sum(gain(*pair) for pair in pairwise(rates))
    assert chain == pytest.approx(gain(rates[0], rates[-1]), abs=1e-9)
    assert gain(rates[0], rates[1]) == pytest.approx(-gain(rates[1], rates[0]), abs=1e-9)


def test_echo_gain_of_an_unknown_reward_is_unknown() -> None:
    row = function_row("f", pass_rate=0.5)
    item = RewardItem(text="", row=row, outcome=RewardOutcome(reward=None))
    assert rewards(make_reward("echo_gain"), item) == [None]
    with pytest.raises(ValueError, match="eta"):
        make_reward("echo_gain", eta=0)


def test_what_they_read_must_be_there() -> None:
    for name in ("judge", "judge_gate", "transition"):
        with pytest.raises(ValueError, match=r"rows\.parquet: row 0: row 'add/0' has no pass_rate"):
            rewards(make_reward(name), RewardItem(text="", critique=CORRECT, row=function_row()))
        with pytest.raises(ValueError, match="item 0"):
            rewards(make_reward(name), RewardItem(text="", critique=CORRECT))
    item = RewardItem(text="", critique=CORRECT, row=function_row(pass_rate=1.0))
    with pytest.raises(ValueError, match="critic"):
        rewards(make_reward("transition"), item)
    with pytest.raises(ValueError, match="critic"):
        rewards(make_reward("delta"), item)
    with pytest.raises(ValueError, match="finite"):
        make_reward("transition", right_to_wrong=math.nan)
    with pytest.raises(ValueError, match="wrong_to_left"):
        make_reward("transition", wrong_to_left=1.0)
