"""``ioi_code``: olympiad problems, points per subtask, each worth its weakest test.

A row's column ``subtasks`` is a list (or its JSON) of ``{"points": 20, "tests": [0, 1, 2]}``, where
``tests`` counts the row's stdin/stdout cases from 0. A test may belong to several subtasks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ctrl_megatron.data.rows import Row
from ctrl_megatron.rewards.cache import VerdictCache
from ctrl_megatron.rewards.code_rewards import CodeReward
from ctrl_megatron.rewards.grading import (
    MAX_REQUESTS,
    RUN_TIMEOUT,
    GradingJob,
    Judge,
    cases_of,
    grading_job,
)
from ctrl_megatron.types import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class IoiSubtask:
    """A group of tests that earns its points together."""

    points: float
    """Points for a full score, positive."""
    tests: tuple[int, ...]
    """Numbers of its tests, from 0; not empty."""


class IoiCodeReward(CodeReward):
    """``ioi_code``: the points of an olympiad problem, by subtasks.

    The row has stdin/stdout cases in ``selected_uts`` and a column ``subtasks``; ``language`` holds
    where the row has no column of that name. With ``normalise`` the points are divided by the
    problem's full points.
    """

    name = "ioi_code"

    def __init__(
        self,
        *,
        provider: Judge,
        language: str = "cpp",
        normalise: bool = False,
        run_timeout: float = RUN_TIMEOUT,
        max_requests: int = MAX_REQUESTS,
        cache: VerdictCache | None = None,
    ) -> None:
        super().__init__(
            provider=provider, run_timeout=run_timeout, max_requests=max_requests, cache=cache
        )
        self._language, self._normalise = language, normalise

    def _job(self, text: str, row: Row) -> GradingJob:
        subtasks_of(row, len(cases_of(row)))  # before anything runs
        return grading_job(
            text,
            row,
            run_all_cases=True,
            run_timeout=self._run_timeout,
            language=row.extra.get("language") or self._language,
        )

    def _score(self, verdict: Verdict, row: Row) -> float:
        subtasks = subtasks_of(row, verdict.total)
        # A verdict that never came is a failure.
        missing = [0.0] * (verdict.total - len(verdict.passed))
        points = ioi_score(subtasks, [*map(float, verdict.passed), *missing])
        return points / sum(s.points for s in subtasks) if self._normalise else points


def ioi_score(subtasks: Sequence[IoiSubtask], test_scores: Sequence[float]) -> float:
    """The sum over subtasks of points times the smallest score of the subtask's tests.

    ``test_scores`` lie in [0, 1], one per test of the problem.
    """
    return sum(s.points * min(test_scores[test] for test in s.tests) for s in subtasks)


def subtasks_of(row: Row, tests: int) -> list[IoiSubtask]:
    """The row's subtasks over its ``tests`` tests. Raises ``ValueError`` naming the row."""
    place, given = f"{row.place}: {row.id!r}", row.extra.get("subtasks")
    try:
        entries = json.loads(given) if isinstance(given, str) else given
        subtasks = [
            IoiSubtask(points=float(e["points"]), tests=tuple(int(t) for t in e["tests"]))
            for e in entries or ()
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{place}: subtasks must be a list of {{points, tests}}: {error!r}"
        ) from error
    if not subtasks:
        raise ValueError(f"{place}: ioi_code needs the column subtasks, and it is empty")
    for subtask in subtasks:
        if not math.isfinite(subtask.points) or subtask.points <= 0:
            raise ValueError(f"{place}: a subtask's points must be positive")
        if not subtask.tests or not all(0 <= test < tests for test in subtask.tests):
            raise ValueError(
                f"{place}: a subtask names tests {list(subtask.tests)}; the row has tests 0 to "
                f"{tests - 1}"
            )
    return subtasks
