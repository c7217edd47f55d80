"""Rewards that depend on more than the program: ``overlong`` on the length of the response,
``judgment`` on the critique's judgment, ``transition`` on what the revision changed.

``judgment`` and ``transition`` are for critics and not in the paper. CTRL (arXiv 2502.03492)
rewards the revision only: it never checks that "Correct" or "Incorrect" is true, and it does not
distinguish a repaired solution from one that was right before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.rewards.items import RewardItem, Rewards, item_rows

OVERLONG = ("overlong", "soft_overlong_punishment")
"""Names of DAPO's punishment of long responses: the first is turned on by
``reward.overlong_buffer``, the second is a name for ``reward.reward_funcs``."""


def soft_overlong_punishment(length: int, *, max_length: int, cache_length: int) -> float:
    """0 up to ``max_length - cache_length`` tokens, then linear to -1 at ``max_length``, then -1.

    Source: DAPO (arXiv 2503.14476), section 3.4.
    """
    start = max_length - cache_length
    if length <= start:
        return 0.0
    return -1.0 if length >= max_length else (start - length) / cache_length


class SoftOverlongPunishment:
    """``soft_overlong_punishment`` of every item's ``length``.

    ``cache_length`` is the width of the slope in tokens. Raises ``ValueError`` where
    ``cache_length`` is not in (0, ``max_length``], and for an item without a length.
    """

    def __init__(self, *, max_length: int, cache_length: int) -> None:
        if not 0 < cache_length <= max_length:
            raise UserError(
                f"soft_overlong_punishment needs 0 < cache_length <= max_length, got cache_length "
                f"{cache_length} and max_length {max_length}"
            )
        self._max_length, self._cache_length = max_length, cache_length

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        return [self._punish(item) for item in items]

    def _punish(self, item: RewardItem) -> float:
        if item.length is None:
            raise ValueError(
                "soft_overlong_punishment needs RewardItem.length, the tokens of the response"
            )
        return soft_overlong_punishment(
            item.length, max_length=self._max_length, cache_length=self._cache_length
        )


class JudgmentReward:
    """``judgment``: 1 where the critique's judgment of the first solution is true, and else 0, also
    for a critique without a judgment. Raises ``UserError`` for a row without ``pass_rate``.
    """

    reads = ("pass_rate",)

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        rows = item_rows("judgment", items)
        return [
            float(item.judgment == _was_right(row)) for item, row in zip(items, rows, strict=True)
        ]


class TransitionReward:
    """``transition``: a value for each change from the first solution to the revision. A solution
    is right where it passes every test; the values (1, 1, 0, 0) are the paper's reward.

    A critique without a judgment has no revision and earns 0. The reward is None where the
    revision's verdict is unknown or ``copying`` masked the critique; a critique that was penalised
    for copying earns at most 0. Reads ``RewardItem.outcome``, so the run must have the function
    ``critic``. Raises ``UserError`` for a row without ``pass_rate``.
    """

    reads = ("pass_rate",)

    def __init__(
        self,
        *,
        wrong_to_right: float = 0.0,
        right_to_right: float = 0.0,
        right_to_wrong: float = 0.0,
        wrong_to_wrong: float = 0.0,
    ) -> None:
        self._values = {
            (False, True): wrong_to_right,
            (True, True): right_to_right,
            (True, False): right_to_wrong,
            (False, False): wrong_to_wrong,
        }
        if not all(map(math.isfinite, self._values.values())):
            raise UserError("the values of transitions must be finite numbers")

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        rows = item_rows("transition", items)
        return [self._value(item, _was_right(row)) for item, row in zip(items, rows, strict=True)]

    def _value(self, item: RewardItem, before: bool) -> float | None:
        if item.judgment is None:
            return 0.0
        if item.outcome is None:
            raise ValueError("transition needs the outcome of the reward function critic")
        verdict = item.outcome.verdict
        if verdict is None or item.outcome.copying == "mask":
            return None
        value = self._values[before, verdict.accepted]
        return min(0.0, value) if item.outcome.copying == "penalise" else value


def _was_right(row: Row) -> bool:
    if row.pass_rate is None:
        raise UserError(
            f"{row.place or 'a row'}: row {row.id!r} has no pass_rate, which "
            "reward.judgment_weight and reward.transition compare with; judge the first "
            "solutions (ctrl-synthesize) or leave these keys at 0"
        )
    return row.pass_rate >= 1.0
