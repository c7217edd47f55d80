"""From an answer and a row to one request, from the judge's answer to one verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.problems.long_integers import loads, long_integers
from ctrl_megatron.problems.tests import DEFAULT_TIME_LIMIT, function_record
from ctrl_megatron.prompts import extract_code, fenced
from ctrl_megatron.rewards.cache import VerdictCache, fingerprint
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.sandbox.datasets.functions import read_function_tests, told_tests
from ctrl_megatron.sandbox.wire import (
    GRADER_VERSION,
    EvalResult,
    EvalTestCase,
    SubmitRequest,
    TestConfig,
)
from ctrl_megatron.types import Problem, Verdict

RUN_TIMEOUT = int(DEFAULT_TIME_LIMIT)
"""Seconds that one test may take where the row does not say."""
MAX_REQUESTS = 256
"""Requests that one batch of rewards keeps under way, by default."""
TIMED_OUT = "TimeLimitExceeded"
"""``Verdict.detail`` of a test that ran out of time."""


class Judge(Protocol):
    """What grading needs of a sandbox client or a provider."""

    async def submit(self, request: SubmitRequest, /) -> EvalResult:
        """Judge a completion; raise ``SandboxError`` when the service fails."""
        ...

    async def identity(self) -> object:
        """Whatever about the judge may change a verdict, as plain data."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingJob:
    """A request and the number of tests it must be judged on."""

    request: SubmitRequest
    total: int

    @property
    def key(self) -> str:
        """Equal only for equal programs, tests, set-up, entry point, statement of a function
        problem, time limit and mode.
        """
        with long_integers():
            return fingerprint(GRADER_VERSION, self.request.model_dump(mode="json"))


def grading_job(
    text: str,
    row: Row,
    *,
    run_all_cases: bool,
    run_timeout: float = RUN_TIMEOUT,
    language: str = "python",
) -> GradingJob:
    """How to judge the program in ``text`` on the tests of ``row``.

    A test may take ``run_timeout`` seconds where the row does not say. The program is extracted
    here and sent fenced, so that the judge has nothing to guess. Raises ``ValueError`` for a
    LiveCodeBench row without its columns.
    """
    kind, data, total = _tests_of(row)
    config = TestConfig(
        dataset_type=kind,
        language=language,
        run_timeout=float(run_timeout) if row.time_limit is None else row.time_limit,
        provided_data=data,
        extra={"run_all_cases": run_all_cases},
    )
    # Half a character (a lone surrogate) is no text on the wire.
    text = text.encode(errors="replace").decode()
    completion = fenced(extract_code(text, language.lower()), language)
    request = SubmitRequest(
        dataset=row["prompter_type"], id=0, completion=completion, config=config
    )
    return GradingJob(request=request, total=total)


def check_tests(rows: Iterable[Row]) -> None:
    """Raise ``ValueError`` naming the row whose asserts no sandbox could judge."""
    for row in rows:
        if row.prompter_type == "mbppplus":
            try:
                read_function_tests(_tests_of(row)[1])
            except ValueError as error:
                raise UserError(f"{row.id!r}: {error}", file=row.place) from error


def _tests_of(row: Row) -> tuple[str, dict[str, Any], int]:
    """``dataset_type``, ``provided_data`` and number of tests of a row."""
    comparison = {"comparison": row.comparison} if row.comparison else {}
    if row.prompter_type == "mbppplus":
        data = function_record(list(row.selected_uts), row.test_setup, row.entry_point, row.problem)
        return "MBPPDataset", {**data, **comparison}, len(told_tests(data))
    if row.prompter_type == "code_contests":
        cases = cases_of(row)
        return "CommonOJDataset", {"test": cases, **comparison}, len(cases)
    names = ("content", "labels", "test")
    if missing := [name for name in names if name not in row.extra]:
        raise UserError(
            f"{row.place}: livecodebench needs column(s) {', '.join(missing)} for {row.id!r}"
        )
    data = {"id": row.id, **{name: row.extra[name] for name in names}, **comparison}
    return "LiveCodeBenchDataset", data, 1


def told_of_tests(problem: Problem) -> list[str]:
    """Of a function problem, what to tell of the test behind each verdict."""
    tests = cast("tuple[str, ...]", problem.selected_uts)
    return told_tests(
        function_record(tests, problem.test_setup, problem.entry_point, problem.statement)
    )


def cases_of(row: Row) -> list[dict[str, Any]]:
    """The tests of a stdin/stdout problem, each ``{"input": {"stdin"}, "output": {"stdout"}}``."""
    if not isinstance(row.selected_uts, str):
        raise UserError(f"{row.place}: selected_uts of {row.id!r} has no stdin/stdout cases")
    return loads(row.selected_uts)


async def grade(judge: Judge, job: GradingJob) -> Verdict:
    """Have ``job`` judged; ``SandboxError`` if the service fails or answers for other tests: fewer
    are an answer only where judging ends at the first failure.
    """
    result = await judge.submit(job.request)
    cases = result.tests
    to_first_failure = not job.request.config.extra.get("run_all_cases", False)
    finished = len(cases) == job.total or (
        to_first_failure and cases and len(cases) < job.total and not cases[-1].passed
    )
    if not finished or result.accepted != all(case.passed for case in cases):
        raise SandboxError(
            f"the sandbox answered with {len(cases)} verdict(s), accepted={result.accepted}, "
            f"for {job.total} test(s) of a {job.request.dataset} sample"
        )
    return Verdict(
        passed=tuple(case.passed for case in cases),
        total=job.total,
        detail=tuple(map(_why, cases)),
        timed_out=any(case.timed_out for case in cases),
    )


class CachedJudge:
    """``judge`` behind ``cache``: equal programs on equal tests are judged once.

    The key is the job's (exact program, tests, checker, time limit, mode, grader version) and the
    judge's ``identity``: whatever else may change a verdict, such as its limits and its isolation.
    """

    def __init__(self, judge: Judge, cache: VerdictCache) -> None:
        self._judge, self._cache = judge, cache
        self._identity: object = None

    async def key(self, job: GradingJob) -> str:
        """The cache's key of ``job``. Raises ``SandboxError`` where the judge cannot be asked."""
        if self._identity is None:
            self._identity = await self._judge.identity()
        return fingerprint(job.key, self._identity)

    async def grade(self, job: GradingJob, semaphore: asyncio.Semaphore) -> tuple[Verdict, bool]:
        """The verdict, and whether it came without a run; ``semaphore`` bounds runs. Raises
        ``SandboxError``.
        """

        async def run() -> Verdict:
            async with semaphore:
                return await grade(self._judge, job)

        return await self._cache.get(await self.key(job), run)


def _why(case: EvalTestCase) -> str:
    if case.passed:
        return ""
    if case.exec_info.timed_out:
        return TIMED_OUT
    run = case.exec_info.run_result
    crashed = run is not None and run.return_code not in (0, None)
    last_line = (run.stderr or "").strip().rpartition("\n")[2] if run and crashed else ""
    reason = str((case.test_info or {}).get("reason") or case.exec_info.message or "")
    parts = (reason, last_line) if last_line not in reason else (reason,)
    return ": ".join(filter(None, parts))[:500] or str(case.exec_info.status)
