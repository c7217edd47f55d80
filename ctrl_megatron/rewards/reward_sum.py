"""What is rewarded, by which functions, and the one sum of rewards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.prompts import parse_judgment
from ctrl_megatron.types import Verdict

if TYPE_CHECKING:
    from ctrl_megatron.rewards.critic import RewardModelForCritic
    from ctrl_megatron.rewards.grading import Judge

Value = TypeVar("Value")
Rewards = list[float | None]
"""One per item; None where nothing is known."""
LARGEST_REWARD = 1e9
"""Squares of rewards, advantages and gradients up to here add up in float32 over any batch."""
Copying = Literal["measure", "penalise", "mask"]
"""What is done about a critique that carries the program of its revision: nothing, a reward of 0,
no reward.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """What one critique or solution earned, and why."""

    reward: float | None
    """In [0, 1]; None where the judge failed, so that nothing is known, and where ``copying`` is
    "mask": mask the sample out."""
    judgment: bool | None = None
    """What the critique says about the answer; None without a judgment."""
    verdict: Verdict | None = None
    """On the program; None where none ran: no judgment, or a fault."""
    copied: float | None = None
    """Share of the revision's program that is in the critique; None where there is no revision."""
    copying: Copying = "measure"
    """What was done about that: "measure" is nothing."""
    cached: bool = False
    """The verdict was remembered or shared with an equal program of the batch."""
    error: str = ""
    """The judge's fault; empty unless that is why ``reward`` is None."""

    @property
    def pass_rate(self) -> float | None:
        """Passed tests over all tests; None where no program ran."""
        return None if self.verdict is None else self.verdict.pass_rate

    @property
    def detail(self) -> str:
        """What went wrong first, or the fault; empty where nothing did."""
        details = () if self.verdict is None else self.verdict.detail
        return next((text for text in details if text), self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardItem:
    """One text that is rewarded, and what is known about it."""

    text: str
    """What is rewarded: the revision that followed a critique, or a completion."""
    row: Row | None = None
    """The row with the problem's tests; needed by functions that run programs."""
    critique: str = ""
    """The critique before ``text``; needed by ``critic``."""
    judgment: bool | None = None
    """What ``critique`` says about the first solution; parsed here where it is not given."""
    length: int | None = None
    """Tokens of the response that is trained; needed by overlong punishments."""
    outcome: RewardOutcome | None = None
    """What ``critic`` found; a sum of rewards fills it in."""

    def __post_init__(self) -> None:
        if self.judgment is None and self.critique:
            object.__setattr__(self, "judgment", parse_judgment(self.critique))


class RewardFunction(Protocol):
    """Rewards of a batch, one per item and in order. None: nothing is known, mask the item out."""

    async def __call__(self, items: Sequence[RewardItem], /) -> Rewards: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The rewards of a batch; plain values, so that ranks can send it."""

    parts: dict[str, Rewards]
    """Each function's rewards, without its weight."""
    totals: Rewards
    """Their ``weighted_sum``."""
    outcomes: list[RewardOutcome | None]
    """What ``critic`` found; None where it is not among the functions."""


class RewardSum:
    """``functions``, and their sum, in which each counts ``weights`` times (1 by default).

    All functions run, also those of weight 0: they are metrics. ``critic`` runs first, for the
    items that have no outcome yet, and the others see what it found. ``judge`` is whatever runs
    programs for them; ``close`` closes it. Raises ``ValueError`` for weights that do not match the
    functions or are not finite.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        weights: Mapping[str, float] | None = None,
        *,
        judge: Judge | None = None,
    ) -> None:
        if not functions:
            raise ValueError("there is no reward function; name at least one")
        self.functions = dict(functions)
        self.weights = dict.fromkeys(functions, 1.0) if weights is None else dict(weights)
        self.judge = judge
        if odd := self.weights.keys() ^ self.functions.keys():
            raise ValueError(f"weights and functions differ in {', '.join(sorted(odd))}")
        if not all(map(math.isfinite, self.weights.values())):
            raise ValueError(f"weights must be finite numbers, got {self.weights}")

    @property
    def critic(self) -> RewardModelForCritic | None:
        """The function ``critic``, where there is one."""
        return cast("RewardModelForCritic | None", self.functions.get("critic"))

    async def score(self, items: Sequence[RewardItem]) -> Scores:
        """Every function's rewards of every item, and their sum. Raises what a function raises, and
        ``ValueError`` for one that does not give one reward per item.
        """
        outcomes = [item.outcome for item in items]
        if self.critic is not None:
            new = [number for number, outcome in enumerate(outcomes) if outcome is None]
            made = await self.critic.judge([items[number] for number in new])
            for number, outcome in zip(new, made, strict=True):
                outcomes[number] = outcome
            items = [replace(i, outcome=o) for i, o in zip(items, outcomes, strict=True)]
        others = {name: f for name, f in self.functions.items() if name != "critic"}
        found = await gathered([partial(function, items) for function in others.values()])
        parts = {
            name: checked_rewards(repr(name), given, len(items))
            for name, given in zip(others, found, strict=True)
        }
        if self.critic is not None:
            parts["critic"] = [None if o is None else o.reward for o in outcomes]
        totals = weighted_sum(parts, self.weights)
        for number, total in enumerate(totals):
            if total is not None and not abs(total) <= LARGEST_REWARD:
                raise UserError(
                    f"the rewards of item {number} sum up to {total:g}, and a sum may be at most "
                    f"{LARGEST_REWARD:g} in size",
                    key="reward.reward_weights",
                    remedy="lower the weights, or scale the functions",
                )
        return Scores(
            parts={name: parts[name] for name in self.functions},
            totals=totals,
            outcomes=outcomes,
        )

    async def close(self) -> None:
        """Let go of the judge's connections, where it has any."""
        close = getattr(self.judge, "close", None)
        if close is not None:
            await close()


def checked_rewards(name: str, given: Any, count: int) -> Rewards:
    """``given`` as ``count`` rewards. ``UserError`` naming the function ``name`` for anything else:
    no list, another length, what is no number, not finite, or beyond ``LARGEST_REWARD``.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise UserError(
            f"reward {name} gave {_shown(given)}, not a list",
            remedy=f"give a list of {count} rewards, one per item; None for what is not known",
        )
    if len(given) != count:
        raise UserError(
            f"reward {name} gave {len(given)} rewards for {count} items",
            remedy="give one per item; None for what is not known",
        )
    return [None if value is None else _reward(name, value) for value in given]


def _reward(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(
            f"reward {name} gave {_shown(value)}, not a finite number",
            remedy="give None for what is not known",
        )
    if abs(number) > LARGEST_REWARD:
        raise UserError(
            f"reward {name} gave {_shown(value)}, and a reward may be at most "
            f"{LARGEST_REWARD:g} in size",
            remedy="scale it",
        )
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"


def weighted_sum(parts: Mapping[str, Rewards], weights: Mapping[str, float]) -> Rewards:
    """Per item the sum of weight times part; None where a part with a weight other than 0 is None.

    Every value, product and partial sum is rounded to float32, from left to right in the order of
    ``weights``: to the last bit what float32 tensors would give.
    """
    used = [(_float32(weight), parts[name]) for name, weight in weights.items() if weight]
    count = len(next(iter(parts.values()), ()))
    totals: Rewards = []
    for number in range(count):
        total: float | None = 0.0
        for weight, part in used:
            value = part[number]
            if value is None:
                total = None
                break
            total = _float32(total + _float32(weight * _float32(value)))
        totals.append(total)
    return totals


def _float32(value: float) -> float:
    return c_float(value).value


async def gathered(calls: Sequence[Callable[[], Awaitable[Value]]]) -> list[Value]:
    """All results in order; the first exception cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(call()) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def rows_of(name: str, items: Sequence[RewardItem]) -> list[Row]:
    """Every item's row. Raises ``ValueError`` naming the function and the item without one."""
    rows: list[Row] = []
    for number, item in enumerate(items):
        if item.row is None:
            raise ValueError(
                f"reward {name!r} needs the tests of a row, but item {number} has none"
            )
        rows.append(item.row)
    return rows
