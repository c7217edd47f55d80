"""The weighted sum of a run's reward functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from ctrl_megatron.errors import UserError
from ctrl_megatron.rewards.critic import RewardModelForCritic
from ctrl_megatron.rewards.gathered import gathered
from ctrl_megatron.rewards.grading import Judge
from ctrl_megatron.rewards.items import (
    LARGEST_REWARD,
    RewardFunction,
    RewardItem,
    RewardOutcome,
    Rewards,
    checked_rewards,
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


class RewardSum:
    """Runs the reward functions ``functions`` and adds their rewards up, weighted by ``weights``
    (1 by default).

    Functions of weight 0 run too: their rewards are metrics. ``critic`` runs first, for the items
    without an outcome, and the other functions read its outcomes. ``judge`` runs their programs and
    is closed by ``close``. Raises ``ValueError`` for weights that do not match the functions or are
    not finite.
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
        """The reward function ``critic``; None where the run has none."""
        return cast("RewardModelForCritic | None", self.functions.get("critic"))

    async def score(self, items: Sequence[RewardItem]) -> Scores:
        """The rewards of every function for every item, and their weighted sum.

        Raises the exception of a function that fails, and ``UserError`` for a function that does
        not return one reward per item or a sum that is larger than ``LARGEST_REWARD``.
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

    async def close(self) -> None:
        """Close the judge's connections, where it has any."""
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


def _float32(value: float) -> float:
    return c_float(value).value
