"""The records of a reward: the rewarded item, its outcome, and the reward function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.prompts import parse_judgment
from ctrl_megatron.types import Verdict

Rewards = list[float | None]
"""One reward per item; None where the reward is unknown."""
LARGEST_REWARD = 1e9
"""Largest size of a reward. Sums of squares of such rewards, advantages and gradients stay finite
in float32 for every batch."""
Copying = Literal["measure", "penalise", "mask"]
"""The treatment of a critique that contains its revision's program: no change, a reward of 0, or no
reward.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """The reward of one critique or solution, and the reasons for it."""

    reward: float | None
    """Reward in [0, 1]. None masks the sample out: the sandbox failed, or ``copying`` is "mask"."""
    judgment: bool | None = None
    """The critique's judgment of the first solution; None where the critique has none."""
    verdict: Verdict | None = None
    """The verdict on the program; None where no program ran: no judgment, or the sandbox failed."""
    copied: float | None = None
    """Share of the revision's program that is in the critique; None where there is no revision."""
    copying: Copying = "measure"
    """The treatment that was applied to the reward because of ``copied``; "measure" is none."""
    cached: bool = False
    """True where the verdict, or the judge's failure, came from the cache or from an equal program
    of the same batch."""
    error: str = ""
    """Message of the judge's failure; empty unless it is the reason why ``reward`` is None."""
    refused: bool = False
    """True where the judge works, and judges no program on the tests of this row."""

    @property
    def judgable(self) -> bool:
        """Whether a judge was asked about the text, which needs a program in it."""
        return self.verdict is not None or bool(self.error)

    @property
    def pass_rate(self) -> float | None:
        """Passed tests over all tests; None where no program ran."""
        return None if self.verdict is None else self.verdict.pass_rate

    @property
    def detail(self) -> str:
        """Message of the first failed test, else the sandbox's failure, else empty."""
        details = () if self.verdict is None else self.verdict.detail
        return next((text for text in details if text), self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardItem:
    """One text that is rewarded, with its context."""

    text: str
    """The rewarded text: the revision that followed a critique, or a completion."""
    row: Row | None = None
    """The row with the problem's tests. Reward functions that run programs require it."""
    critique: str = ""
    """The critique before ``text``. The reward function ``critic`` requires it."""
    judgment: bool | None = None
    """The critique's judgment of the first solution; parsed from ``critique`` where not given."""
    length: int | None = None
    """Number of tokens of the response that is trained. ``overlong`` requires it."""
    outcome: RewardOutcome | None = None
    """The outcome of the reward function ``critic``; ``RewardSum`` fills it in."""

    def __post_init__(self) -> None:
        if self.judgment is None and self.critique:
            object.__setattr__(self, "judgment", parse_judgment(self.critique))


class RewardFunction(Protocol):
    """Returns one reward per item, in order; None where the reward is unknown, so that the item
    counts in no loss and no mean."""

    async def __call__(self, items: Sequence[RewardItem], /) -> Rewards: ...


@runtime_checkable
class JudgingReward(RewardFunction, Protocol):
    """A reward function that runs programs, which reports its judge's failures item by item."""

    async def judge(self, items: Sequence[RewardItem], /) -> list[RewardOutcome]:
        """The outcome of every item, in order."""
        ...


@runtime_checkable
class EagerReward(JudgingReward, Protocol):
    """A reward function that can start to judge an item before its batch is complete."""

    def begin(self, item: RewardItem, /) -> None:
        """Start to judge ``item``; the next ``judge`` of an equal item takes the result. Call it on
        the event loop of ``judge``. Raises as ``judge`` does where the item cannot be judged.
        """
        ...


def item_rows(name: str, items: Sequence[RewardItem]) -> list[Row]:
    """The row of every item. Raises ``ValueError`` that names the reward function ``name`` and the
    item without a row.
    """
    rows: list[Row] = []
    for number, item in enumerate(items):
        if item.row is None:
            raise ValueError(
                f"reward {name!r} needs the tests of a row, but item {number} has none"
            )
        rows.append(item.row)
    return rows


def check_returned_rewards(name: str, returned: Any, count: int) -> Rewards:
    """``returned`` as a list of ``count`` rewards.

    Raises ``UserError`` that names the reward function ``name`` where it is no list, has another
    length, or has an entry that is no finite number or larger than ``LARGEST_REWARD``.
    """
    if isinstance(returned, (str, bytes)) or not isinstance(returned, Sequence):
        raise UserError(
            f"reward {name} returned {_shown(returned)}, not a list",
            remedy=f"return a list of {count} rewards, one per item; None for an unknown reward",
        )
    if len(returned) != count:
        raise UserError(
            f"reward {name} returned {len(returned)} rewards for {count} items",
            remedy="return one per item; None for an unknown reward",
        )
    return [None if value is None else _reward(name, value) for value in returned]


def _reward(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(
            f"reward {name} returned {_shown(value)}, not a finite number",
            remedy="return None for an unknown reward",
        )
    if abs(number) > LARGEST_REWARD:
        raise UserError(
            f"reward {name} returned {_shown(value)}; a reward may be at most "
            f"{LARGEST_REWARD:g} in size",
            remedy="scale it",
        )
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"
