"""From a program and a row's tests to a request, and from the judge's answer to a verdict."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

from ctrl_megatron.background import advance_wait, gather_results
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.problems.fields import json_field, object_field
from ctrl_megatron.problems.long_integers import allow_long_integers, load_long_integer_json
from ctrl_megatron.problems.tests import DEFAULT_TIME_LIMIT, function_record
from ctrl_megatron.prompts import extract_code, fence_code
from ctrl_megatron.rewards.cache import VerdictCache, json_fingerprint
from ctrl_megatron.rewards.items import RewardOutcome
from ctrl_megatron.rewards.normalize import normalize_code
from ctrl_megatron.sandbox.client import RequestRefused, SandboxError, SandboxSilent
from ctrl_megatron.sandbox.limits import SandboxLimits
from ctrl_megatron.sandbox.task import require_judgeable
from ctrl_megatron.sandbox.wire import (
    GRADER_VERSION,
    EvalResult,
    EvalTestCase,
    SubmitRequest,
    TestConfig,
)
from ctrl_megatron.types import Problem, Verdict

_log = logging.getLogger(__name__)
RUN_TIMEOUT = int(DEFAULT_TIME_LIMIT)
"""Seconds that one test may take where its row sets no limit."""
MAX_REQUESTS = 256
"""Default of the number of requests of one batch that run at the same time."""
TIMED_OUT = "TimeLimitExceeded"
"""``Verdict.detail`` of a test that timed out, followed by the limit where the judge names it."""
_LATE = "time limit exceeded"


SHARED_PROCESS = (
    "run in the process of the program that they judge, which can read their input, print what "
    "they would print, and exit"
)
"""The danger of a program to the graders of an olympiad's task, for messages."""
OLYMPIAD = "IOIDataset"
"""The kind of tests that have programs of their own, and scores between 0 and 1."""


class Judge(Protocol):
    """The part of a sandbox client or a provider that grading uses."""

    async def submit(self, request: SubmitRequest, /) -> EvalResult:
        """Judge a completion. Raises ``SandboxError`` where the service fails."""
        ...

    async def identity(self) -> object:
        """The properties of the judge that may change a verdict, as plain data."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingJob:
    """A request to judge one program, and the number of tests that the answer must cover."""

    request: SubmitRequest
    total: int | None
    """None where only the judge can count the unit tests."""
    key: str
    """Equal only for equal programs, tests, set-up, entry point, statement of a function problem,
    time limit, mode and grader version."""
    tests: str = ""
    """``RowTests.digest``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTests:
    """The tests of a row as the judge reads them; all programs of the row share them."""

    dataset: str
    config: TestConfig
    total: int | None
    """Number of tests that count; None where only the judge can count them."""
    digest: str
    """Fingerprint of the tests, the mode, the time limit and the grader version."""

    def job_of_program(self, program: str) -> GradingJob:
        """How to judge ``program`` (code without a fence) on these tests."""
        # Sent in a fence, so that the judge extracts exactly this program.
        completion = fence_code(program, self.config.language or "python")
        return GradingJob(
            request=SubmitRequest(
                dataset=self.dataset, id=0, completion=completion, config=self.config
            ),
            total=self.total,
            key=json_fingerprint(self.digest, completion),
            tests=self.digest,
        )


def row_tests(
    row: Row,
    *,
    run_all_cases: bool,
    run_timeout: float = RUN_TIMEOUT,
    language: str = "python",
    shared_process_graders: bool = False,
) -> RowTests:
    """The tests of ``row``. A test may take ``run_timeout`` seconds where the row sets no limit.
    Programs in the columns ``checker`` and ``grader_files`` of a stdin/stdout row, records of the
    sandbox's ``IOIDataset`` or their JSON, judge with its tests.

    Raises ``UserError`` for a LiveCodeBench row without its columns, for a stdin/stdout row without
    cases, and, without ``shared_process_graders``, for a row with ``grader_files``.
    """
    config, total = _config_of(
        row,
        run_all_cases=run_all_cases,
        run_timeout=run_timeout,
        language=language,
        shared_process_graders=shared_process_graders,
    )
    with allow_long_integers():
        digest = json_fingerprint(
            GRADER_VERSION, row["prompter_type"], config.model_dump(mode="json")
        )
    return RowTests(dataset=row["prompter_type"], config=config, total=total, digest=digest)


def _config_of(
    row: Row,
    *,
    run_all_cases: bool,
    run_timeout: float = RUN_TIMEOUT,
    language: str = "python",
    shared_process_graders: bool = False,
) -> tuple[TestConfig, int | None]:
    """The tests of ``row`` as the judge reads them, and their number."""
    if has_graders(row) and not shared_process_graders:
        raise UserError(
            f"{row.id!r}: the programs in column 'grader_files' {SHARED_PROCESS}",
            file=row.place,
            key="reward.shared_process_graders=false",
            remedy="leave the row out, or set the key to true",
        )
    kind, data, total = _tests_of(row)
    config = TestConfig(
        dataset_type=kind,
        language=language,
        run_timeout=float(run_timeout) if row.time_limit is None else row.time_limit,
        provided_data=data,
        extra={"run_all_cases": run_all_cases},
    )
    return config, total


class BatchTests:
    """The tests of the rows of one batch, read once per row and not once per program.

    ``options`` are those of ``row_tests``. Rows that differ only in their first solutions share
    their tests.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._known: dict[Hashable, RowTests] = {}

    def tests_of_row(self, row: Row, **options: Any) -> RowTests:
        """``row_tests`` of ``row`` with the further ``options`` of this row."""
        key = (
            *(row.id, row.prompter_type, row.selected_uts, row.test_setup, row.entry_point),
            *(row.problem, row.comparison, row.time_limit, row.uncounted, id(row.extra)),
            *options.items(),
        )
        if key not in self._known:
            self._known[key] = row_tests(row, **self._options, **options)
        return self._known[key]


def program_to_judge(text: str, language: str = "python") -> str:
    """The program in ``text`` as it is sent to a judge."""
    return extract_code(replace_surrogates(text), language.lower())


def replace_surrogates(text: str) -> str:
    """``text`` with "?" for every lone surrogate, which UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


def grading_job(text: str, row: Row, **options: Any) -> GradingJob:
    """How to judge the program in ``text`` on the tests of ``row``; ``options`` are those of
    ``row_tests``.
    """
    program = program_to_judge(text, options.get("language", "python"))
    return row_tests(row, **options).job_of_program(program)


RequestCheck = Callable[[SubmitRequest], object]
"""Raises ``ValueError`` for a request that a judge would refuse, whatever its program."""
check_request: RequestCheck = partial(require_judgeable, limits=SandboxLimits())
"""The check of this package's sandbox with its default limits."""


def check_tests(rows: Iterable[Row], **options: Any) -> None:
    """``count_judgeable_tests`` of every row, for its ``UserError``."""
    for row in rows:
        count_judgeable_tests(row, **options)


def count_judgeable_tests(
    row: Row, check: RequestCheck = check_request, **options: Any
) -> int | None:
    """The number of tests of ``row`` (``RowTests.total``). Raises ``UserError`` that names file and
    row where a judge with this ``check`` can judge no program on them. ``options`` are those of
    ``row_tests``.
    """
    try:
        config, total = _config_of(row, run_all_cases=True, **options)
        check(SubmitRequest(dataset=row["prompter_type"], id=0, completion="", config=config))
    except ValueError as error:
        if isinstance(error, UserError) and row.place and row.place in str(error):
            raise
        raise UserError(f"{row.id!r}: {error}", file=row.place) from error
    return total


def has_graders(row: Row) -> bool:
    """Whether programs of the row's task are compiled with the program that they judge."""
    return row.extra.get("grader_files") not in (None, "")


def _tests_of(row: Row) -> tuple[str, dict[str, Any], int | None]:
    """``dataset_type``, ``provided_data`` and number of tests (``RowTests.total``) of a row."""
    comparison = {"comparison": row.comparison} if row.comparison else {}
    if row.prompter_type == "mbppplus":
        data = function_record(list(row.selected_uts), row.test_setup, row.entry_point, row.problem)
        left_out = {"uncounted": list(row.uncounted)} if row.uncounted else {}
        total = None
        if not any("def test" in text for text in row.selected_uts):
            total = len(row.selected_uts) - len(row.uncounted)
        return "MBPPDataset", {**data, **comparison, **left_out}, total
    if row.prompter_type == "code_contests":
        cases = stdio_cases(row)
        programs = _programs_of(row)
        if programs:
            return OLYMPIAD, {**_one_subtask(cases), **programs, **comparison}, len(cases)
        return "CommonOJDataset", {"test": cases, **comparison}, len(cases)
    names = ("content", "labels", "test")
    if missing := [name for name in names if name not in row.extra]:
        raise UserError(
            f"{row.place}: livecodebench needs column(s) {', '.join(missing)} for {row.id!r}"
        )
    data = {"id": row.id, **{name: row.extra[name] for name in names}, **comparison}
    return "LiveCodeBenchDataset", data, 1


def _programs_of(row: Row) -> dict[str, Any]:
    """The programs in the columns ``checker`` and ``grader_files`` of ``row``, which judge with its
    tests; JSON texts are read. UserError for other values.
    """
    found = {}
    for name in ("checker", "grader_files"):
        given = row.extra.get(name)
        if given in (None, ""):
            continue
        try:
            found[name] = object_field(json_field(given, name), name)
        except ValueError as error:
            raise UserError(f"{row.id!r}: column {error}", file=row.place) from error
    return found


def _one_subtask(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tests = {
        str(number): {"input": case["input"]["stdin"], "output": case["output"]["stdout"]}
        for number, case in enumerate(cases)
    }
    return {"tests": tests, "subtasks": [{"points": 1, "tests": list(tests)}]}


def descriptions_of_tests(problem: Problem, verdict: Verdict) -> list[str]:
    """The text that describes each test of a function problem, one per entry of the verdict."""
    counted = (t for n, t in enumerate(problem.selected_uts) if n not in problem.uncounted)
    return list(verdict.tests or counted)[: len(verdict.passed)]


def stdio_cases(row: Row) -> list[dict[str, Any]]:
    """The tests of a stdin/stdout problem, each ``{"input": {"stdin"}, "output": {"stdout"}}``."""
    if not isinstance(row.selected_uts, str):
        raise UserError(f"{row.place}: selected_uts of {row.id!r} has no stdin/stdout cases")
    return load_long_integer_json(row.selected_uts)


def outcome_with_reward(
    answer: RewardOutcome | None,
    score: Callable[[Verdict], float],
    judgment: bool | None = None,
) -> RewardOutcome:
    """The ``answer`` of ``CachedJudge.grade_all`` with the ``score`` of its verdict as reward; a
    reward of 0 where nothing ran."""
    if answer is None:
        return RewardOutcome(reward=0.0)
    reward = None if answer.verdict is None else score(answer.verdict)
    return replace(answer, reward=reward, judgment=judgment)


async def request_verdict(judge: Judge, job: GradingJob) -> Verdict:
    """The verdict of ``judge`` on ``job``.

    Raises ``SandboxError`` where the service fails or answers for another number of tests. Fewer
    tests are an answer only where judging ends at the first failure, and any number above 0 where
    only the judge can count the tests.
    """
    result = await judge.submit(job.request)
    cases = result.tests
    total = max(1, len(cases)) if job.total is None else job.total
    to_first_failure = not job.request.config.extra.get("run_all_cases", False)
    finished = len(cases) == total or (
        to_first_failure and cases and len(cases) < total and not cases[-1].passed
    )
    if not finished or result.accepted != all(case.passed for case in cases):
        raise SandboxError(
            f"the sandbox answered with {len(cases)} verdict(s), accepted={result.accepted}, "
            f"for {total} test(s) of a {job.request.dataset} sample"
        )
    return Verdict(
        passed=tuple(case.passed for case in cases),
        total=total,
        detail=tuple(map(_why, cases)),
        timed_out=any(case.timed_out for case in cases),
        scores=tuple(map(_points, cases)) if job.request.config.dataset_type == OLYMPIAD else (),
        tests=tuple(map(test_label, cases)) if job.total is None else (),
        unjudgeable=any(map(is_unjudgeable, cases)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Retry failed judgments if more than ``share`` of a batch failed: up to ``retries`` times,
    after ``pause`` seconds, which are doubled every time. A program on which the judge was silent
    has waited long enough and is not judged again.
    """

    share: float = 0.0
    retries: int = 0
    pause: float = 5.0


class CachedJudge:
    """A judge with a cache: equal programs are judged once on equal tests.

    The cache's key combines the job's key with the judge's ``identity``, such as its limits and its
    isolation. In a cache that is ``normalised``, programs with one normal form count as equal.
    """

    def __init__(
        self, judge: Judge, cache: VerdictCache, patience: RetryPolicy | None = None
    ) -> None:
        self._judge, self._cache = judge, cache
        self._patience = RetryPolicy() if patience is None else patience
        self._identity: object = None
        self._begun: dict[str, deque[asyncio.Task[tuple[Verdict, bool]]]] = {}
        """Key of a job -> its runs that ``begin`` started and ``grade`` has not taken yet."""
        self._told = set[str]()
        """Ids of rows that a warning has named because no program of theirs could be judged."""

    async def cache_key(self, job: GradingJob) -> str:
        """The cache's key of ``job``. Raises ``SandboxError`` where the judge does not answer."""
        if self._identity is None:
            self._identity = await self._judge.identity()
        if not self._cache.normalised:
            return json_fingerprint(job.key, self._identity)
        program = normalize_code(extract_code(job.request.completion))
        return json_fingerprint("normal form", job.tests, program, self._identity)

    def start_grading(self, job: GradingJob, semaphore: asyncio.Semaphore) -> None:
        """Start what the next ``grade`` of an equal job returns or raises."""
        run = asyncio.ensure_future(self._grade(job, semaphore))
        run.add_done_callback(_looked_at)
        self._begun.setdefault(job.key, deque()).append(run)

    async def grade(self, job: GradingJob, semaphore: asyncio.Semaphore) -> tuple[Verdict, bool]:
        """The verdict on ``job``, and True where it came from the cache or from a run that another
        caller started. ``semaphore`` bounds runs. Raises ``SandboxError``.
        """
        if (begun := self._begun.get(job.key)) is None:
            return await self._grade(job, semaphore)
        run = begun.popleft()
        if not begun:
            del self._begun[job.key]
        return await run

    async def _grade(self, job: GradingJob, semaphore: asyncio.Semaphore) -> tuple[Verdict, bool]:
        async def run() -> Verdict:
            async with semaphore:
                return await request_verdict(self._judge, job)

        return await self._cache.get_or_run(await self.cache_key(job), run)

    def warn_of_refused_tests(
        self, rows: Sequence[Row], answers: Sequence[RewardOutcome | None]
    ) -> None:
        """Warn which rows have no reward because the judge refuses their tests and, once, of which
        rows no program could be judged."""
        pairs = [(row, a) for row, a in zip(rows, answers, strict=True) if a is not None]
        for row, why in {row.id: (row, a.error) for row, a in pairs if a.refused}.values():
            _log.warning("%s cannot be judged and has no reward: %s", _named(row), why)
        judged = {row.id for row, a in pairs if a.verdict and not a.verdict.unjudgeable}
        for row, a in pairs:
            if a.verdict and row.id not in judged | self._told:
                self._told.add(row.id)
                why = next((text for text in a.verdict.detail if text), "")
                text = "%s: none of its programs could be judged, and all count as failures: %s"
                _log.warning(text, _named(row), why)

    async def grade_all(
        self,
        jobs: Sequence[GradingJob | None],
        max_requests: int,
        judged: Callable[[], None] = lambda: None,
    ) -> list[RewardOutcome | None]:
        """The answer for every job, in order, without a reward; None where there is no job. A
        failure of the judge is an answer without a verdict.

        At most ``max_requests`` requests run at the same time. ``judged`` is called once per entry
        of ``jobs``: after the first attempt of a job, and for a None.
        """
        semaphore = asyncio.Semaphore(max_requests)
        failures: list[SandboxError | RequestRefused] = []
        silent = set[int]()
        """The jobs during which the judge gave no sign of life until the limit of a request."""

        async def attempt(number: int, job: GradingJob) -> RewardOutcome:
            try:
                verdict, cached = await self.grade(job, semaphore)
            except (SandboxError, RequestRefused) as error:
                text = " ".join(str(error).split()) or "no message"
                # All callers of a run get the same error.
                shared = any(error is other for other in failures)
                failures.append(error)
                if isinstance(error, SandboxSilent):
                    silent.add(number)
                refused = isinstance(error, RequestRefused)
                return RewardOutcome(reward=None, cached=shared, error=text, refused=refused)
            return RewardOutcome(reward=None, verdict=verdict, cached=cached)

        async def first(number: int, job: GradingJob | None) -> RewardOutcome | None:
            answer = None if job is None else await attempt(number, job)
            judged()
            advance_wait()
            return answer

        found = await gather_results([partial(first, *pair) for pair in enumerate(jobs)])
        patience, asked = self._patience, sum(job is not None for job in jobs)
        for retry in range(patience.retries + 1):
            failed = {
                i: answer
                for i, answer in enumerate(found)
                if answer and answer.error and not answer.refused
            }
            if not failed:
                break
            count, (*_, last) = f"{len(failed)} of {asked} programs", failed.values()
            again = [i for i in failed if i not in silent]
            enough = len(failed) <= patience.share * asked
            if enough or not again or retry == patience.retries:
                _log.warning("%s were not judged: %s", count, last.error)
                break
            pause = patience.pause * 2**retry
            _log.warning("%s are judged again in %.0f s: %s", count, pause, last.error)
            await asyncio.sleep(pause)
            calls = [partial(attempt, i, cast(GradingJob, jobs[i])) for i in again]
            for i, answer in zip(again, await gather_results(calls), strict=True):
                found[i] = answer
        return found


def _named(row: Row) -> str:
    return f"{row.place}: {row.id!r}" if row.place else repr(row.id)


def _looked_at(run: asyncio.Task[tuple[Verdict, bool]]) -> None:
    """Take the error of a run that nothing awaits any more, which asyncio would print."""
    if not run.cancelled():
        run.exception()


def test_label(case: EvalTestCase) -> str:
    """The text of the test, or the name of the unit test."""
    return str((case.test_info or {}).get("test", ""))


def is_unjudgeable(case: EvalTestCase) -> bool:
    """Whether the judge could not decide, for example because the program's own operator would
    have."""
    return (case.test_info or {}).get("unjudgeable") is True


def _points(case: EvalTestCase) -> float:
    return float((case.test_info or {})["score"])


def _why(case: EvalTestCase) -> str:
    if case.passed:
        return ""
    reason = str((case.test_info or {}).get("reason") or case.exec_info.message or "")
    if case.exec_info.timed_out:
        _, named, limit = reason.partition(f"{_LATE} (")
        return f"{TIMED_OUT} ({limit}" if named else TIMED_OUT
    run = case.exec_info.run_result
    crashed = run is not None and run.return_code not in (0, None)
    last_line = (run.stderr or "").strip().rpartition("\n")[2] if run and crashed else ""
    parts = (reason, last_line) if last_line not in reason else (reason,)
    return ": ".join(filter(None, parts))[:500] or str(case.exec_info.status)
