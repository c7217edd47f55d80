"""Rewards for critics beyond the paper's, off by default.

The paper's reward (CTRL, arXiv 2502.03492) looks at the revision only: whether the critique's
"Correct" or "Incorrect" was true is never checked, and a solution that was right before counts like
one that was repaired. These two terms change that. Pure functions of plain values; None stands for
what is not known, and an unknown input that matters makes the reward None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionTable:
    """A reward for each transition from the first solution's verdict to the revision's."""

    wrong_to_right: float
    right_to_right: float
    right_to_wrong: float
    wrong_to_wrong: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if not math.isfinite(getattr(self, field.name)):
                raise ValueError(f"transition reward {field.name} must be a finite number")

    @classmethod
    def from_mapping(cls, values: Mapping[str, float]) -> TransitionTable:
        """From the four names. Raises ``ValueError`` naming what is missing or unknown."""
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            odd = ", ".join(sorted(set(values) ^ names))
            raise ValueError(f"a transition table has the keys {', '.join(names)}; check {odd}")
        return cls(**{name: float(value) for name, value in values.items()})


PAPER = TransitionTable(
    wrong_to_right=1.0, right_to_right=1.0, right_to_wrong=0.0, wrong_to_wrong=0.0
)
"""The paper's reward as a table: only the verdict afterwards counts."""


def judgment_reward(judgment: bool | None, truth: bool | None, weight: float) -> float | None:
    """``weight`` where the critique's judgment of the first solution is true, else 0.

    ``judgment``: True for "Correct", False for "Incorrect", None for no judgment, which earns 0.
    ``truth``: whether the first solution passes every test; None where it was never judged, and
    then the term is None. A weight of 0 is 0 whatever is known.
    """
    if weight == 0 or judgment is None:
        return 0.0
    if truth is None:
        return None
    return weight if judgment == truth else 0.0


def transition_reward(
    before: bool | None, after: bool | None, table: TransitionTable
) -> float | None:
    """The table's entry for the verdicts of the first solution and of the revision (every test
    passed); None where one of them is unknown.
    """
    if before is None or after is None:
        return None
    if before:
        return table.right_to_right if after else table.right_to_wrong
    return table.wrong_to_right if after else table.wrong_to_wrong


def judgment_rewards(
    judgments: Sequence[bool | None], truths: Sequence[bool | None], weight: float
) -> list[float | None]:
    """``judgment_reward`` row by row. Raises ``ValueError`` for lists of unequal length."""
    return [judgment_reward(*pair, weight) for pair in zip(judgments, truths, strict=True)]


def transition_rewards(
    before: Sequence[bool | None], after: Sequence[bool | None], table: TransitionTable
) -> list[float | None]:
    """``transition_reward`` row by row. Raises ``ValueError`` for lists of unequal length."""
    return [transition_reward(*pair, table) for pair in zip(before, after, strict=True)]


def added(rewards: Sequence[float | None], terms: Sequence[float | None]) -> list[float | None]:
    """Reward and term row by row; None where either is."""
    return [
        None if reward is None or term is None else reward + term
        for reward, term in zip(rewards, terms, strict=True)
    ]


def truth_of(pass_rate: float | None) -> bool | None:
    """Whether a solution with this pass rate is right: every test passed. None stays None."""
    return None if pass_rate is None else pass_rate >= 1.0
