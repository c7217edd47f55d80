"""Overlong punishment, judgment and transition: rewards beyond the program itself."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from reward_samples import CORRECT, INCORRECT, function_row

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
    assert rewards(make_reward("judgment"), item) == [reward]


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


def test_what_they_read_must_be_there() -> None:
    for name in ("judgment", "transition"):
        with pytest.raises(ValueError, match=r"rows\.parquet: row 0: row 'add/0' has no pass_rate"):
            rewards(make_reward(name), RewardItem(text="", critique=CORRECT, row=function_row()))
        with pytest.raises(ValueError, match="item 0"):
            rewards(make_reward(name), RewardItem(text="", critique=CORRECT))
    item = RewardItem(text="", critique=CORRECT, row=function_row(pass_rate=1.0))
    with pytest.raises(ValueError, match="critic"):
        rewards(make_reward("transition"), item)
    with pytest.raises(ValueError, match="finite"):
        make_reward("transition", right_to_wrong=math.nan)
    with pytest.raises(ValueError, match="wrong_to_left"):
        make_reward("transition", wrong_to_left=1.0)
