"""Rewards that look at more than the program: its length, the judgment, what a revision changed.

``overlong`` (DAPO's punishment), ``judgment`` and ``transition``; the latter two are for critics
and beyond the paper: CTRL (arXiv 2502.03492) looks at the revision only, so whether the critique's
"Correct" or "Incorrect" was true is never checked, and a solution that was right before counts like
one that was repaired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.rewards.items import RewardItem, Rewards, rows_of

OVERLONG = ("overlong", "soft_overlong_punishment")
"""Names of DAPO's punishment: as ``reward.overlong_buffer`` turns it on, and in
``reward.reward_funcs``."""


def soft_overlong_punishment(length: int, *, max_length: int, cache_length: int) -> float:
    """0 up to ``max_length - cache_length`` tokens, linear to -1 at ``max_length``, -1 beyond.

    Source: DAPO (arXiv 2503.14476), section 3.4.
    """
    start = max_length - cache_length
    if length <= start:
        return 0.0
    return -1.0 if length >= max_length else (start - length) / cache_length


class SoftOverlongPunishment:
    """``soft_overlong_punishment`` of every item's ``length``.

    ``cache_length`` is the width of the slope in tokens. Raises ``ValueError`` for lengths that do
    not fit, and for an item whose length is unknown.
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
    """``judgment``: 1 where the critique's judgment of the first solution is true, else 0, also
    without a judgment. Raises ``ValueError`` for a row without ``pass_rate``.
    """

    reads = ("pass_rate",)

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        rows = rows_of("judgment", items)
        return [
            float(item.judgment == _was_right(row)) for item, row in zip(items, rows, strict=True)
        ]


class TransitionReward:
    """``transition``: the value of what happened from the first solution to the revision.

    A critique without a judgment has no revision and earns 0; None where the revision's verdict is
    unknown. A critique that was penalised for copying earns no more than 0, a masked one None.
    Reads ``RewardItem.outcome``, so ``critic`` must be among the functions. Right is a
    solution that passes every test; (1, 1, 0, 0) is the paper's own reward. Raises ``ValueError``
    for a row without ``pass_rate``.
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
        rows = rows_of("transition", items)
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
