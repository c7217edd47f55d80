"""Rewards that depend on more than the program: ``overlong`` on the length of the response,
``judge`` on the critique's judgment, ``delta``, ``echo_gain`` and ``transition`` on what the
revision changed.

The last four are for critics and not in the paper. CTRL (arXiv 2502.03492) rewards the revision
only: it never checks that "Correct" or "Incorrect" is true, and it does not distinguish a repaired
solution from one that was right before.
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


class JudgeReward:
    """``judge``: ``right`` where the critique's judgment of the first solution is true, ``wrong``
    where it is false, ``unreadable`` where the critique has none.

    A first solution is right where it passes at least the share ``correct_if`` of its tests; 1 is
    all of them. The paper of Critique-RL (arXiv 2510.24320) has the values 1, 0 and 0, its code 1,
    -1 and -1; Critique-Coder (arXiv 2509.22824) calls a program right above 80 % of its tests.
    Raises ``UserError`` for a row without ``pass_rate``.
    """

    reads = ("pass_rate",)

    def __init__(
        self,
        *,
        right: float = 1.0,
        wrong: float = 0.0,
        unreadable: float = 0.0,
        correct_if: float = 1.0,
    ) -> None:
        self._values = {True: right, False: wrong, None: unreadable}
        self._correct_if = correct_if

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        return [
            self._values[judgment_is_true(item.judgment, row, self._correct_if)]
            for item, row in zip(items, item_rows("judge", items), strict=True)
        ]


class JudgeGate:
    """``judge_gate``: 1 where the critique's judgment is false or missing, so that
    ``reward.judge.gate`` replaces the sum of all rewards, and else 0. ``correct_if`` as in
    ``JudgeReward``. Source: ``reward_with_discrimination.py`` of Critique-RL.
    """

    reads = ("pass_rate",)

    def __init__(self, *, correct_if: float = 1.0) -> None:
        self._correct_if = correct_if

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        return [
            float(judgment_is_true(item.judgment, row, self._correct_if) is not True)
            for item, row in zip(items, item_rows("judge_gate", items), strict=True)
        ]


class DeltaReward:
    """``delta``: the reward of ``critic`` less what the first solution would earn, which is its
    pass rate, or with ``run_all_cases`` false 1 where it passes every test and else 0.

    All critiques of a group are about one first solution, so that ``delta`` has the advantages of
    ``critic`` under every baseline that is computed within the group. None where the reward of
    ``critic`` is. Reads ``RewardItem.outcome``, so the run must have the function ``critic``.
    Raises ``UserError`` for a row without ``pass_rate``.
    """

    reads = ("pass_rate",)

    def __init__(self, *, run_all_cases: bool = True) -> None:
        self._run_all_cases = run_all_cases

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        rows = item_rows("delta", items)
        return [self._change(item, row) for item, row in zip(items, rows, strict=True)]

    def _change(self, item: RewardItem, row: Row) -> float | None:
        if item.outcome is None:
            raise ValueError("delta needs the outcome of the reward function critic")
        before = first_pass_rate(row)
        if not self._run_all_cases:
            before = float(before >= 1)
        return None if item.outcome.reward is None else item.outcome.reward - before


class EchoGain:
    """``echo_gain``: ln((1 - before + eta) / (1 - after + eta)), where ``after`` is the reward of
    ``critic`` and ``before`` what the first solution would earn. The same gain counts more the
    nearer it is to 1, the gains of a chain add up, and no change is 0.

    Source: the saturation-aware gain of ECHO (arXiv 2601.06794), whose ``eta`` is not known. As
    ``DeltaReward`` otherwise.
    """

    reads = ("pass_rate",)

    def __init__(self, *, run_all_cases: bool = True, eta: float = 0.1) -> None:
        if not (math.isfinite(eta) and eta > 0):
            raise UserError(f"echo_gain needs a positive eta, got {eta}")
        self._delta, self._eta = DeltaReward(run_all_cases=run_all_cases), eta

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        gains = await self._delta(items)
        return [self._weighted(item, gain) for item, gain in zip(items, gains, strict=True)]

    def _weighted(self, item: RewardItem, gain: float | None) -> float | None:
        if gain is None or item.outcome is None or item.outcome.reward is None:
            return None
        left = 1 - item.outcome.reward + self._eta
        return math.log((left + gain) / left)


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
        return [
            self._value(item, first_pass_rate(row) >= 1)
            for item, row in zip(items, rows, strict=True)
        ]

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


def judgment_is_true(judgment: bool | None, row: Row, correct_if: float = 1.0) -> bool | None:
    """Whether ``judgment`` of the row's first solution, which is right where it passes at least
    the share ``correct_if`` of its tests, is true; None without a judgment. Raises ``UserError``
    for a row without ``pass_rate``.
    """
    right = first_pass_rate(row) >= correct_if
    return None if judgment is None else judgment == right


def first_pass_rate(row: Row) -> float:
    """The share of its tests that the row's first solution passes. Raises ``UserError`` for a row
    without ``pass_rate``.
    """
    if row.pass_rate is None:
        raise UserError(
            f"{row.place or 'a row'}: row {row.id!r} has no pass_rate, which reward.judge, "
            "reward.transition, delta and echo_gain compare with; judge the first "
            "solutions (ctrl-synthesize) or leave these keys at 0"
        )
    return row.pass_rate
