"""The weighted sum of a run's reward functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from ctypes import c_float
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from ctrl_megatron.background import gather_results, track_wait
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.rewards.critic import RewardModelForCritic
from ctrl_megatron.rewards.grading import Judge
from ctrl_megatron.rewards.items import (
    LARGEST_REWARD,
    EagerReward,
    JudgingReward,
    RewardFunction,
    RewardItem,
    RewardOutcome,
    Rewards,
    check_returned_rewards,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The rewards of a batch, as plain values that ranks can send to each other."""

    parts: dict[str, Rewards]
    """Name of a reward function -> its rewards, not multiplied by its weight."""
    totals: Rewards
    """The ``weighted_sum`` of ``parts``."""
    outcomes: list[RewardOutcome | None]
    """Outcomes of ``critic``, one per item; None where the run has no ``critic``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCounts:
    """How often a service was asked to judge a program, and how often it failed."""

    asked: int = 0
    failed: int = 0
    refused: int = 0
    """Further programs that it refused to judge because of their row's tests."""
    cached: int = 0
    """Further answers for which it was not asked: from the cache, or to an equal program."""
    unjudgeable: int = 0
    """Answers, also from the cache, of which a test could not be judged."""
    error: str = ""
    """Message of the last failure."""

    def __add__(self, other: JudgeCounts) -> JudgeCounts:
        return JudgeCounts(
            asked=self.asked + other.asked,
            failed=self.failed + other.failed,
            refused=self.refused + other.refused,
            cached=self.cached + other.cached,
            unjudgeable=self.unjudgeable + other.unjudgeable,
            error=other.error or self.error,
        )

    @classmethod
    def from_outcomes(cls, outcomes: Iterable[RewardOutcome | None]) -> JudgeCounts:
        judgable = [outcome for outcome in outcomes if outcome is not None and outcome.judgable]
        judged = [outcome for outcome in judgable if not outcome.refused]
        asked = [outcome for outcome in judged if not outcome.cached]
        errors = [outcome.error for outcome in asked if outcome.error]
        return cls(
            asked=len(asked),
            failed=len(errors),
            refused=len(judgable) - len(judged),
            cached=len(judged) - len(asked),
            unjudgeable=sum(o.verdict is not None and o.verdict.unjudgeable for o in judged),
            error=errors[-1] if errors else "",
        )


class RewardSum:
    """Runs the reward functions ``functions`` and adds their rewards up, weighted by ``weights``
    (1 by default).

    Functions of weight 0 run too: their rewards are metrics. ``critic`` runs first, for the items
    without an outcome, and the other functions read its outcomes. ``judge`` runs their programs and
    is closed by ``close``; ``judging`` counts how it fared since ``pop_judge_counts``. A function
    that ``tasks`` names rewards the items of rows of these tasks; to the sums of others it adds
    nothing, and its reward of them is None. With a ``gate`` that number is the sum where the
    function ``judge_gate`` gives 1. Without functions every sum is 0. Raises ``ValueError`` for
    weights that do not match the functions or are not finite.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        weights: Mapping[str, float] | None = None,
        *,
        judge: Judge | None = None,
        tasks: Mapping[str, Sequence[str]] | None = None,
        gate: float | None = None,
    ) -> None:
        self.functions = dict(functions)
        self.weights = dict.fromkeys(functions, 1.0) if weights is None else dict(weights)
        self.judge, self.judging, self._tasks = judge, JudgeCounts(), dict(tasks or {})
        self._gate = gate
        if odd := self.weights.keys() ^ self.functions.keys():
            raise ValueError(f"weights and functions differ in {', '.join(sorted(odd))}")
        if not all(map(math.isfinite, self.weights.values())):
            raise ValueError(f"weights must be finite numbers, got {self.weights}")

    @property
    def critic(self) -> RewardModelForCritic | None:
        return cast("RewardModelForCritic | None", self.functions.get("critic"))

    async def score(self, items: Sequence[RewardItem]) -> Scores:
        """The rewards of every function for every item, and their weighted sum.

        Raises the exception of a function that fails, and ``UserError`` for a function that does
        not return one reward per item or a sum that is larger than ``LARGEST_REWARD``.
        """
        outcomes = [item.outcome for item in items]
        if self.critic is not None:
            new = [n for n in self._mine("critic", items) if outcomes[n] is None]
            with track_wait("the reward 'critic'", len(new)):
                made = await self.critic.judge([items[number] for number in new])
            self.judging += JudgeCounts.from_outcomes(made)
            for number, outcome in zip(new, made, strict=True):
                outcomes[number] = outcome
            items = [replace(i, outcome=o) for i, o in zip(items, outcomes, strict=True)]
        others = {name: f for name, f in self.functions.items() if name != "critic"}
        found = await gather_results([partial(self._run, name, items) for name in others])
        parts = dict(zip(others, found, strict=True))
        if self.critic is not None:
            earned = [None if outcome is None else outcome.reward for outcome in outcomes]
            parts["critic"] = check_returned_rewards("'critic'", earned, len(items))
        counted = self._counted(parts, items)
        totals = combine_rewards(counted, self.weights, self._gate) or [0.0] * len(items)
        for number, total in enumerate(totals):
            if total is not None and not abs(total) <= LARGEST_REWARD:
                raise UserError(
                    f"the weighted rewards of item {number} add up to {total:g}; a sum may be at "
                    f"most {LARGEST_REWARD:g} in size",
                    key="reward.reward_weights",
                    remedy="lower the weights, or scale the functions",
                )
        return Scores(
            parts={name: parts[name] for name in self.functions},
            totals=totals,
            outcomes=outcomes,
        )

    def begin(self, item: RewardItem) -> None:
        """Start to judge ``item`` before its batch is complete; the next ``score`` of an equal item
        takes the result. Functions that need the whole batch start with ``score``.

        Call it on the event loop of ``score``. Raises as that where the item cannot be judged.
        """
        for name, function in self.functions.items():
            if isinstance(function, EagerReward) and self._mine(name, [item]):
                function.begin(item)

    def begin_solution(self, text: str, row: Row) -> None:
        """As ``begin``, for ``judge_solutions``."""
        assert self.critic is not None
        self.critic.begin_solution(text, row)

    async def judge_solutions(
        self, texts: Sequence[str], rows: Sequence[Row]
    ) -> list[RewardOutcome]:
        """``RewardModelForCritic.judge_solutions``; the run has a ``critic``."""
        assert self.critic is not None
        with track_wait("the judging of solutions", len(rows)):
            outcomes = await self.critic.judge_solutions(texts, rows)
        self.judging += JudgeCounts.from_outcomes(outcomes)
        return outcomes

    async def first_judge_outcomes(self, items: Sequence[RewardItem]) -> list[RewardOutcome]:
        """The outcomes of the first function that runs programs, ``critic`` excepted. UserError
        where the run has none.
        """
        for name, function in self.functions.items():
            if isinstance(function, JudgingReward) and name != "critic":
                with track_wait(f"the reward {name!r}", len(items)):
                    outcomes = await function.judge(items)
                self.judging += JudgeCounts.from_outcomes(outcomes)
                return outcomes
        raise UserError(
            f"a verdict on a program is needed, and none of {', '.join(self.functions)} runs one",
            key="reward.reward_funcs",
            remedy="add code",
        )

    async def _run(self, name: str, items: Sequence[RewardItem]) -> Rewards:
        """The rewards of ``name``; None for items that it does not reward."""
        mine = self._mine(name, items)
        rewards: Rewards = [None] * len(items)
        if mine or not items:
            own = await self._asked(name, [items[n] for n in mine])
            for n, reward in zip(
                mine, check_returned_rewards(repr(name), own, len(mine)), strict=True
            ):
                rewards[n] = reward
        return rewards

    async def _asked(self, name: str, items: Sequence[RewardItem]) -> Rewards:
        function = self.functions[name]
        with track_wait(f"the reward {name!r}", len(items)):
            if not isinstance(function, JudgingReward):
                return await function(items)
            outcomes = await function.judge(items)
        self.judging += JudgeCounts.from_outcomes(outcomes)
        return [outcome.reward for outcome in outcomes]

    def _mine(self, name: str, items: Sequence[RewardItem]) -> list[int]:
        tasks = self._tasks.get(name)
        return [
            number
            for number, item in enumerate(items)
            if tasks is None or item.row is None or item.row.task in tasks
        ]

    def _counted(
        self, parts: Mapping[str, Rewards], items: Sequence[RewardItem]
    ) -> dict[str, Rewards]:
        """``parts`` with 0 where a function does not reward an item."""
        return {
            name: [reward if number in mine else 0.0 for number, reward in enumerate(rewards)]
            for name, rewards in parts.items()
            for mine in [set(self._mine(name, items))]
        }

    def pop_judge_counts(self) -> JudgeCounts:
        """The counts since the last call: ``judging``, which begins anew."""
        taken, self.judging = self.judging, JudgeCounts()
        return taken

    def with_own_counts(self) -> RewardSum:
        """A ``RewardSum`` of the same functions and judge, with a ``judging`` of its own."""
        other = copy(self)
        other.judging = JudgeCounts()
        return other

    async def close(self) -> None:
        close = getattr(self.judge, "close", None)
        if close is not None:
            await close()


def weighted_sum(parts: Mapping[str, Rewards], weights: Mapping[str, float]) -> Rewards:
    """The sum of weight times reward, one per item; None where a reward with a weight other than 0
    is None.

    Every value, product and partial sum is rounded to float32, from left to right in the order of
    ``weights``, so that the sum equals that of float32 tensors to the last bit.
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


def combine_rewards(
    parts: Mapping[str, Rewards], weights: Mapping[str, float], gate: float | None = None
) -> Rewards:
    """The ``weighted_sum``, and with a ``gate`` that number in its place where the part
    ``judge_gate`` is 1."""
    totals = weighted_sum(parts, weights)
    if gate is None:
        return totals
    closed = parts["judge_gate"]
    return [gate if shut else total for shut, total in zip(closed, totals, strict=True)]


def _float32(value: float) -> float:
    return c_float(value).value
