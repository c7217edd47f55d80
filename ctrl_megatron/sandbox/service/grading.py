"""Judging submissions: the program is taken out of the completion, every test is run, and the
verdicts become the contract's ``EvalResult``.

Functions are tested in a judge process of the jail; outputs are compared here, case by case, or by
the problem's checker; olympiad problems get a score for each subtask.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ctrl_megatron.problems.comparison import SANDBOX_FUSION, difference
from ctrl_megatron.sandbox import wire
from ctrl_megatron.sandbox.datasets import READERS
from ctrl_megatron.sandbox.datasets.problems import (
    FunctionProblem,
    GradedProblem,
    ScoredProblem,
    StdioCase,
    StdioProblem,
)
from ctrl_megatron.sandbox.languages import (
    PYTHON,
    ExtractedProgram,
    Language,
    extract_code,
    language_named,
)
from ctrl_megatron.sandbox.limits import CASE_CHARACTERS, VERDICT_CHARACTERS
from ctrl_megatron.sandbox.service.checker import OutputChecker
from ctrl_megatron.sandbox.service.problem_clock import ProblemClock
from ctrl_megatron.sandbox.service.programs import (
    DEFAULT_CPP_STANDARD,
    STOP_REASONS,
    Program,
    ProgramRunner,
    problem_seconds_within,
    run_response,
    seconds_within,
)
from ctrl_megatron.sandbox.service.reading import aside

_LANGUAGE_REQUIRED = ("CommonOJDataset",)
_TEXTS_OF_CASE = 6
"""That a verdict tells: output and errors, and in its ``test_info`` input, expected and got output
and the reason.
"""
_AT_ONCE = 16
"""Tests of one request that are under way."""
_SHORT = 8192
"""Characters of a completion, and of an output, that are looked at without a thread."""
CaseScorer = Callable[[StdioCase], Awaitable[tuple[wire.EvalTestCase, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request, read: what is judged, how and by whom."""

    runner: ProgramRunner
    request: wire.SubmitRequest
    problem: GradedProblem
    language: Language
    extracted: ExtractedProgram
    clock: ProblemClock

    @property
    def shown(self) -> int:
        """Characters of each text that a verdict tells: however many cases a request has, the
        answer is bounded.
        """
        cases = (
            self.problem.tests if isinstance(self.problem, FunctionProblem) else self.problem.cases
        )
        return min(CASE_CHARACTERS, VERDICT_CHARACTERS // (_TEXTS_OF_CASE * len(cases)) + 1)

    @property
    def compatible(self) -> bool:
        """Compare as SandboxFusion does, to compare services with; never for a reward."""
        return self.request.config.extra.get("compatibility") == SANDBOX_FUSION.name

    @property
    def run_all(self) -> bool:
        """Judge every test instead of stopping at the first failure."""
        return bool(self.request.config.extra.get("run_all_cases", False))

    @property
    def seconds(self) -> float | None:
        """Wall clock of one test; None leaves it to the service's limits."""
        asked = self.request.config.run_timeout
        return self.problem.seconds if asked is None else asked

    def result(
        self,
        verdicts: Iterable[wire.EvalTestCase],
        *,
        accepted: bool,
        extra: dict[str, Any] | None = None,
    ) -> wire.EvalResult:
        """The answer on the wire."""
        problem, code = self.problem, self.extracted.code
        functions = isinstance(problem, FunctionProblem)
        return wire.EvalResult(
            id=self.request.id,
            accepted=accepted,
            extracted_code=code,
            full_code=code + problem.adapter if functions else code,
            test_code="\n".join(problem.tests) if functions else None,
            tests=list(verdicts),
            extracted_type=self.extracted.kind,
            extra=extra,
        )


async def grade(runner: ProgramRunner, request: wire.SubmitRequest) -> wire.EvalResult:
    """Judge one submission. Raises ``ValueError`` (bad request), ``WorkerFault``, ``QueueFull``."""
    submission = await _read(runner, request)
    result = await _judge(submission)
    if submission.compatible:
        result.extra = {**(result.extra or {}), "compatibility": SANDBOX_FUSION.name}
    return result


async def _read(runner: ProgramRunner, request: wire.SubmitRequest) -> Submission:
    config = request.config
    if config.custom_extract_logic:
        raise ValueError(
            "custom_extract_logic is refused: it would run your code inside the service"
        )
    kind = config.dataset_type or request.dataset
    if kind not in READERS:
        known = ", ".join(sorted(READERS))
        raise ValueError(f"dataset_type {kind!r} is not supported; supported: {known}")
    data = config.provided_data
    if not isinstance(data, dict):
        raise ValueError("provided_data must be an object; this service keeps no data sets")
    by_default = config.language is None and kind not in _LANGUAGE_REQUIRED
    language = PYTHON if by_default else language_named(config.language)
    compatibility = config.extra.get("compatibility")
    if compatibility not in (None, SANDBOX_FUSION.name):
        raise ValueError(
            f"extra.compatibility must be {SANDBOX_FUSION.name!r}, got {compatibility!r}"[:200]
        )
    if compatibility is not None:
        data = {**data, "first_of_list": True}
    # Reading may unpack megabytes: other requests go on meanwhile.
    problem = await aside(READERS[kind], data)
    if compatibility is not None and not isinstance(problem, FunctionProblem):
        problem = replace(problem, rule=SANDBOX_FUSION)
    asked = problem.seconds if config.run_timeout is None else config.run_timeout
    seconds = problem_seconds_within(
        runner.limits, config.extra.get("problem_seconds"), seconds_within(runner.limits, asked)
    )
    extracted = (
        extract_code(request.completion, language)
        if len(request.completion) < _SHORT
        else await aside(extract_code, request.completion, language)
    )
    return Submission(
        runner=runner,
        request=request,
        problem=_first_cases(problem, config.extra.get("max_cases")),
        language=language,
        extracted=extracted,
        clock=ProblemClock(seconds),
    )


def _first_cases(problem: GradedProblem, most: Any) -> GradedProblem:
    if most is None:
        return problem
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"extra.max_cases must be a positive integer, got {most!r}"[:200])
    if isinstance(problem, StdioProblem):
        return replace(problem, cases=problem.cases[:most])
    if isinstance(problem, FunctionProblem):
        return replace(
            problem,
            tests=problem.tests[:most],
            marked=problem.marked[:most],
            cases=problem.cases[:most],
        )
    raise ValueError("extra.max_cases does not fit a problem with subtasks")


async def _judge(submission: Submission) -> wire.EvalResult:
    problem, language, config = submission.problem, submission.language, submission.request.config
    if isinstance(problem, FunctionProblem):
        if language is not PYTHON:
            raise ValueError(
                f"tests of Python functions need language python, got {language.name!r}"
            )
        verdicts, total = await _test_functions(submission, problem), len(problem.tests)
        return _all_or_one(submission, verdicts, total, single=problem.single)
    sources = problem.sources if isinstance(problem, ScoredProblem) else {}
    if sources and not language.compiled:
        raise ValueError(f"provided_data.grader_files need language cpp, got {language.name!r}")
    limits, clock = submission.runner.limits, submission.clock
    compiling = limits.test_seconds if config.compile_timeout is None else config.compile_timeout
    program = await submission.runner.prepare(
        language,
        submission.extracted.code,
        compile_seconds=min(compiling, clock.left),
        standard=str(config.extra.get("cpp_standard", DEFAULT_CPP_STANDARD)),
        with_sources=sources,
        prelude=problem.prelude if isinstance(problem, StdioProblem) else "",
    )
    if program.compilation is not None:
        # As long as it took when it was done: a program that was compiled before has no more time.
        clock.spend(program.compilation.result.execution_time or 0.0)
    score_case = await _case_scorer(submission, problem, program)
    if isinstance(problem, ScoredProblem):
        return await _score_subtasks(submission, problem, score_case)

    # A program that did not compile costs nothing to run, but fails every case.
    scored = await _in_order(submission, problem.cases, score_case)
    verdicts = [verdict for verdict, _ in scored]
    return _all_or_one(submission, verdicts, len(problem.cases), single=problem.single)


def _all_or_one(
    submission: Submission, verdicts: list[wire.EvalTestCase], total: int, *, single: bool
) -> wire.EvalResult:
    """Accepted when all of ``total`` passed; with ``single`` one verdict answers for all: the first
    failure, or the last success.
    """
    passed = [verdict.passed for verdict in verdicts]
    accepted = len(verdicts) == total and all(passed)
    if not single:
        return submission.result(verdicts, accepted=accepted)
    first = next((verdict for verdict in verdicts if not verdict.passed), verdicts[-1])
    info = {**(first.test_info or {}), "passed_tests": sum(passed), "tests": total}
    one = first.model_copy(update={"test_info": info})
    return submission.result([one], accepted=accepted, extra={"verdicts": passed})


async def _in_order(
    submission: Submission, cases: Sequence[StdioCase], score_case: CaseScorer
) -> list[tuple[wire.EvalTestCase, float]]:
    """Verdicts in the order of the cases, with scores; without ``run_all`` they end at the first
    failure.

    A few are under way at a time: a request of hundreds must not hold a job for each. After so many
    cases that ran out of time those behind them fail unseen, as asserts do: a program that loops
    would hold a worker for as many time limits as there are cases. Once the problem's time is over
    every case that has no verdict fails.
    """
    if not submission.run_all:
        scored = []
        for case in cases:
            scored.append(await score_case(case))
            if not scored[-1][0].passed:
                break
        return scored
    most, clock = submission.runner.limits.max_timeouts, submission.clock
    slots, end = asyncio.Semaphore(_AT_ONCE), len(cases)

    async def score(number: int) -> tuple[wire.EvalTestCase, float]:
        nonlocal end
        async with slots:
            result = await score_case(cases[number])
        if result[0].timed_out and not submission.compatible:
            late.append(number)
            if len(late) >= most:
                end = sorted(late)[most - 1] + 1
                for task in tasks[end:]:
                    task.cancel()
        if clock.over:
            for task in tasks:
                if task is not asyncio.current_task():
                    task.cancel()
        return result

    late: list[int] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(score(number)) for number in range(len(cases))]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    behind = f"not run: {most} tests timed out before"
    over = f"not run: {STOP_REASONS['job_timeout']}"
    return [
        (_not_run(case, submission.shown, behind), 0.0)
        if number >= end
        else (_not_run(case, submission.shown, over), 0.0)
        if task.cancelled()
        else task.result()
        for number, (task, case) in enumerate(zip(tasks, cases, strict=True))
    ]


def _not_run(case: StdioCase, shown: int, reason: str) -> wire.EvalTestCase:
    texts = {"input": case.input[:shown], "expected": case.output[:shown], "output": ""}
    run = run_response(code=1, timed_out=False, seconds=None, stderr=reason)
    info = {**case.labels, **texts, "reason": reason, "timed_out": True}
    return wire.EvalTestCase(passed=False, exec_info=run, test_info=info)


async def _test_functions(
    submission: Submission, problem: FunctionProblem
) -> list[wire.EvalTestCase]:
    """Every test runs in the judge, with the program in another process.

    Verdicts that never came, because the job was cut short, are failures: nothing missing passes.
    """
    limits, run_all = submission.runner.limits, submission.run_all
    job = {
        "kind": "asserts",
        "code": submission.extracted.code + problem.adapter,
        "prelude": problem.prelude,
        "setup": problem.setup,
        "tests": problem.tests,
        "marked": problem.marked,
        "stubs": problem.stubs,
        "classes": problem.classes,
        "exceptions": problem.exceptions,
        "shared_classes": problem.shared_classes,
        "seconds": seconds_within(limits, submission.seconds),
        "memory_mb": limits.memory_mb,
        "run_all": run_all,
        "problem_seconds": submission.clock.left,
    }
    clock = submission.clock
    report = await submission.runner.pool.run(job, clock.left, clock)
    shown = submission.shown
    verdicts = [_assert_verdict(problem, shown, *row) for row in report["verdicts"]]
    ended = bool(verdicts) and not verdicts[-1].passed and not run_all
    stopped = report["stopped"] or ""
    late = "timeout" in stopped
    status, behind = ("timeout", "not_run") if late else ("failed", "failed")
    reason = STOP_REASONS.get(stopped, "not run")
    while len(verdicts) < len(problem.tests) and not ended:
        verdicts.append(_assert_verdict(problem, shown, len(verdicts), status, reason, None))
        if status != behind:
            status, reason = behind, f"not run: {reason}"[:200]
        ended = not run_all
    return verdicts


def _assert_verdict(
    problem: FunctionProblem,
    shown: int,
    index: int,
    status: str,
    reason: str,
    seconds: float | None,
) -> wire.EvalTestCase:
    passed = status == "passed"
    run = run_response(
        code=int(not passed), timed_out=status == "timeout", seconds=seconds, stderr=reason
    )
    info: dict[str, Any] = {"test": problem.tests[index][:shown], "reason": reason}
    if status == "not_run":
        info["timed_out"] = True
    if problem.cases:
        info |= {name: text[:shown] for name, text in problem.cases[index].items()}
    return wire.EvalTestCase(passed=passed, exec_info=run, test_info=info)


async def _case_scorer(
    submission: Submission, problem: StdioProblem | ScoredProblem, program: Program
) -> CaseScorer:
    """Runs one case: the verdict, and its score in [0, 1]. What is expected never leaves the
    service, but to a checker.
    """
    checker = None
    if problem.checker is not None:
        checker = await OutputChecker.prepare(submission.runner, problem.checker, submission.clock)

    async def score_case(case: StdioCase) -> tuple[wire.EvalTestCase, float]:
        late, clock = False, submission.clock
        run = await submission.runner.run(
            program,
            stdin=case.input,
            seconds=submission.seconds,
            expected=case.output,
            clock=clock,
        )
        if run.failure:
            score, reason = 0.0, run.failure
            if run.timed_out and clock.over:
                reason = STOP_REASONS["job_timeout"]
        elif checker is not None:
            score, reason, late = await checker.score(case, run.stdout)
        else:
            fold = isinstance(problem, StdioProblem) and problem.ignore_case
            compare = functools.partial(difference, ignore_case=fold)
            texts = run.stdout, case.output
            # A megabyte of numbers takes a second.
            reason = (
                compare(*texts, problem.rule)
                if len(run.stdout) < _SHORT
                else await aside(compare, *texts, problem.rule)
            ) or ""
            score = 0.0 if reason else 1.0
        shown = submission.shown
        info = {
            **case.labels,
            "input": case.input[:shown],
            "expected": case.output[:shown],
            "output": run.stdout[:shown],
            "reason": reason[:shown],
            **({"timed_out": True} if late else {}),
        }
        passed = score == 1 and run.response.status is wire.RunStatus.SUCCESS
        told = _cut(run.response, shown)
        return wire.EvalTestCase(passed=passed, exec_info=told, test_info=info), score

    return score_case


def _cut(response: wire.RunCodeResponse, shown: int) -> wire.RunCodeResponse:
    """What a verdict tells of a run: a hundred cases of a program that prints a megabyte each would
    fill the service's memory. The last lines of errors say most.
    """
    cut = {
        name: result.model_copy(
            update={
                "stdout": (result.stdout or "")[:shown],
                "stderr": (result.stderr or "")[-shown:],
            }
        )
        for name in ("run_result", "compile_result")
        if (result := getattr(response, name)) is not None
    }
    return response.model_copy(update=cut)


async def _score_subtasks(
    submission: Submission, problem: ScoredProblem, score_case: CaseScorer
) -> wire.EvalResult:
    """Score each subtask by the least score of its tests; accepted with all points.

    A test that several subtasks share runs once. Without ``run_all`` a subtask ends at its first
    test without a score, the others are still scored.
    """
    verdicts: dict[str, tuple[wire.EvalTestCase, float]] = {}
    if submission.run_all:
        names = list(dict.fromkeys(name for task in problem.subtasks for name in task.tests))
        done = await _in_order(submission, [problem.cases[name] for name in names], score_case)
        verdicts = dict(zip(names, done, strict=True))
    scores: list[dict[str, Any]] = []
    for subtask in problem.subtasks:
        least = 1.0
        for name in subtask.tests:
            if name not in verdicts:
                verdicts[name] = await score_case(problem.cases[name])
            least = min(least, verdicts[name][1])
            if least == 0 and not submission.run_all:
                break
        scores.append(
            {"name": subtask.name, "points": subtask.points, "score": subtask.points * least}
        )
    score, full = (sum(item[key] for item in scores) for key in ("score", "points"))
    return submission.result(
        (
            case.model_copy(
                update={"test_info": {**(case.test_info or {}), "name": name, "score": own}}
            )
            for name, (case, own) in verdicts.items()
        ),
        accepted=all(item["score"] == item["points"] for item in scores),
        extra={"score": score, "max_score": full, "subtasks": scores},
    )
