"""A judge that judges equal programs on equal tests once."""

from __future__ import annotations

import asyncio
from typing import Any

from ctrl_megatron.rewards.cache import ResultCache, fingerprint
from ctrl_megatron.rewards.grading import Graded, GradingJob, Judge, grade


class CachedJudge:
    """``judge`` behind ``cache``.

    The key is the job's (exact program, tests, time limit, mode, grader version) and ``identity``:
    whatever else may change a verdict, such as the judge's memory limit. It defaults to the judge's
    own ``identity``, where it has one.
    """

    def __init__(self, judge: Judge, cache: ResultCache[Graded], *, identity: Any = None) -> None:
        self._judge = judge
        self._cache = cache
        self._identity = getattr(judge, "identity", None) if identity is None else identity

    def key(self, job: GradingJob) -> str:
        """The cache's key of ``job``."""
        return job.key if self._identity is None else fingerprint(job.key, self._identity)

    async def grade(
        self, job: GradingJob, semaphore: asyncio.Semaphore | None = None
    ) -> tuple[Graded, bool]:
        """The verdict, and whether it came without a run. ``semaphore`` bounds runs. Raises
        ``SandboxError``.
        """

        async def run() -> Graded:
            if semaphore is None:
                return await grade(self._judge, job)
            async with semaphore:
                return await grade(self._judge, job)

        return await self._cache.get(self.key(job), run)
