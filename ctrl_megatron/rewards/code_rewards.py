"""Rewards that run an answer's program: ``code``, ``binary_code`` and ``ioi_code``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ctrl_megatron.rewards.cache import ResultCache
from ctrl_megatron.rewards.cached_judge import CachedJudge
from ctrl_megatron.rewards.code_format import WELL_FORMED, code_format_score
from ctrl_megatron.rewards.disk_cache import verdict_cache
from ctrl_megatron.rewards.grading import Graded, GradingJob, Judge, grading_job
from ctrl_megatron.rewards.ioi import ioi_job, ioi_score, subtasks_of
from ctrl_megatron.rewards.items import RewardItem, samples_of
from ctrl_megatron.rewards.samples import RUN_TIMEOUT, Sample
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.types import Verdict

Value = TypeVar("Value")

MAX_REQUESTS = 256


@dataclass(slots=True)
class FaultCounters:
    """What went wrong on the judge's side."""

    faults: int = 0
    """Items that could not be judged; their reward is None."""
    last: str = ""
    """The latest fault's text."""


class _Judging:
    """Judges a batch by one job per item; a fault of the judge is None, never 0."""

    def __init__(
        self,
        provider: Judge,
        cache: ResultCache[Graded] | None = None,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        self._judge = CachedJudge(provider, verdict_cache() if cache is None else cache)
        self._max_requests = max_requests
        self.counters = FaultCounters()

    async def verdicts(self, jobs: Sequence[GradingJob | None]) -> list[Verdict | None]:
        """The verdict of every job; None for no job and for a fault.

        Anything but a fault ends the batch and is raised.
        """
        semaphore = asyncio.Semaphore(self._max_requests)
        return await gathered([lambda job=job: self._verdict(job, semaphore) for job in jobs])

    async def _verdict(
        self, job: GradingJob | None, semaphore: asyncio.Semaphore
    ) -> Verdict | None:
        if job is None:
            return None
        try:
            graded, _ = await self._judge.grade(job, semaphore)
        except SandboxError as error:
            self.counters.faults += 1
            self.counters.last = str(error) or type(error).__name__
            return None
        return graded.verdict


class CodeReward:
    """``code``: the share of a problem's tests that an answer's program passes.

    ``provider`` judges: a ``CodeProvider`` or a ``SandboxClient``. With ``require_format`` an
    answer that is not well-formed (``code_format`` below 1) earns 0 and does not run, as in
    DiffuCoder. Functions that share a ``cache`` run a program once between them.
    """

    name = "code"

    def __init__(
        self,
        *,
        provider: Judge,
        require_format: bool = False,
        run_timeout: float = RUN_TIMEOUT,
        max_requests: int = MAX_REQUESTS,
        cache: ResultCache[Graded] | None = None,
    ) -> None:
        self._judging = _Judging(provider, cache, max_requests)
        self._require_format = require_format
        self._run_timeout = run_timeout

    @property
    def counters(self) -> FaultCounters:
        """Faults so far."""
        return self._judging.counters

    async def __call__(self, items: Sequence[RewardItem]) -> list[float | None]:
        """See ``RewardFunction``. Raises ``ValueError`` for a sample that cannot be judged."""
        samples = samples_of(self.name, items)
        runs = [not self._require_format or _well_formed(item.text) for item in items]
        jobs = [
            self._job(item.text, sample) if run else None
            for item, sample, run in zip(items, samples, runs, strict=True)
        ]
        verdicts = await self._judging.verdicts(jobs)
        return [
            (None if verdict is None else self._score(verdict.pass_rate)) if run else 0.0
            for verdict, run in zip(verdicts, runs, strict=True)
        ]

    def _job(self, text: str, sample: Sample) -> GradingJob:
        return grading_job(text, sample, run_all_cases=True, run_timeout=self._run_timeout)

    def _score(self, pass_rate: float) -> float:
        return pass_rate


class BinaryCodeReward(CodeReward):
    """``binary_code``: 1 where ``code`` is above 0.99, else 0; None stays None."""

    name = "binary_code"
    threshold = 0.99

    def _score(self, pass_rate: float) -> float:
        return float(pass_rate > self.threshold)


class IoiCodeReward:
    """``ioi_code``: the points of an olympiad problem, by subtasks.

    The sample has stdin/stdout cases in ``selected_uts`` and ``subtasks`` (see
    ``ctrl_megatron/rewards/ioi.py``). ``language`` holds where the sample has none. With
    ``normalise`` the points are divided by the problem's full points.
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
        cache: ResultCache[Graded] | None = None,
    ) -> None:
        self._judging = _Judging(provider, cache, max_requests)
        self._language, self._normalise = language, normalise
        self._run_timeout = run_timeout

    @property
    def counters(self) -> FaultCounters:
        """Faults so far."""
        return self._judging.counters

    async def __call__(self, items: Sequence[RewardItem]) -> list[float | None]:
        """See ``RewardFunction``. Raises ``ValueError`` for a sample that cannot be judged."""
        samples = samples_of(self.name, items)
        jobs = [
            ioi_job(item.text, sample, self._language, self._run_timeout)
            for item, sample in zip(items, samples, strict=True)
        ]
        verdicts = await self._judging.verdicts(jobs)
        return [self._points(*pair) for pair in zip(verdicts, samples, strict=True)]

    def _points(self, verdict: Verdict | None, sample: Sample) -> float | None:
        if verdict is None:
            return None
        subtasks = subtasks_of(sample, verdict.total)
        # A verdict that never came is a failure.
        missing = [0.0] * (verdict.total - len(verdict.passed))
        points = ioi_score(subtasks, [*map(float, verdict.passed), *missing])
        return points / sum(s.points for s in subtasks) if self._normalise else points


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


def _well_formed(text: str) -> bool:
    return code_format_score(text, final_newline=False) == WELL_FORMED
