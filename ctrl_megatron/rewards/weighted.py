"""Weighted sums of reward functions, and the metrics of their parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctrl_megatron.rewards.code_rewards import gathered
from ctrl_megatron.rewards.items import RewardFunction, RewardItem

Rewards = list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedRewards:
    """The rewards of a batch."""

    total: Rewards
    """The weighted sum per item; None where a part with a weight is unknown."""
    parts: dict[str, Rewards]
    """Each function's rewards, without its weight."""


class WeightedReward:
    """The sum of ``functions``, each times its weight; ``weights`` default to 1 each.

    All functions run, also those of weight 0: they are metrics. Raises ``ValueError`` for a number
    of weights that does not match, and for one that is not finite.
    """

    def __init__(
        self, functions: Mapping[str, RewardFunction], weights: Sequence[float] | None = None
    ) -> None:
        if not functions:
            raise ValueError("reward_funcs is empty; name at least one reward function")
        weights = [1.0] * len(functions) if weights is None else list(weights)
        if len(weights) != len(functions):
            raise ValueError(
                f"reward_weights has {len(weights)} entries for {len(functions)} reward functions "
                f"({', '.join(functions)}); give one each"
            )
        if not all(math.isfinite(weight) for weight in weights):
            raise ValueError(f"reward_weights must be finite numbers, got {weights}")
        self.functions = dict(functions)
        self.weights = dict(zip(functions, weights, strict=True))

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        """The sums alone; so a weighted sum is a reward function too."""
        return (await self.score(items)).total

    async def score(self, items: Sequence[RewardItem]) -> WeightedRewards:
        """Sums and parts. Raises what a function raises."""
        calls = [lambda f=function: f(items) for function in self.functions.values()]
        results = await gathered(calls)
        parts = dict(zip(self.functions, results, strict=True))
        for name, part in parts.items():
            if len(part) != len(items):
                raise ValueError(
                    f"reward function {name!r} gave {len(part)} rewards for {len(items)} items"
                )
        return WeightedRewards(total=weighted_sum(parts, self.weights), parts=parts)


def weighted_sum(parts: Mapping[str, Rewards], weights: Mapping[str, float]) -> Rewards:
    """Per item the sum of weight times part; None where a part with a weight other than 0 is."""
    used = [(parts[name], weight) for name, weight in weights.items() if weight != 0]
    count = len(next(iter(parts.values()), []))
    return [_sum([(part[row], weight) for part, weight in used]) for row in range(count)]


def reward_metrics(rewards: WeightedRewards) -> dict[str, float]:
    """``reward/NAME/mean`` over the judged items (absent where there is none) and
    ``reward/NAME/unjudged``, their number, for each part.
    """
    metrics: dict[str, float] = {}
    for name, part in rewards.parts.items():
        known = [value for value in part if value is not None]
        if known:
            metrics[f"reward/{name}/mean"] = math.fsum(known) / len(known)
        metrics[f"reward/{name}/unjudged"] = float(len(part) - len(known))
    return metrics


def _sum(terms: Sequence[tuple[float | None, float]]) -> float | None:
    if any(value is None for value, _ in terms):
        return None
    return math.fsum(weight * value for value, weight in terms if value is not None)
