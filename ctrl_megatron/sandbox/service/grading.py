"""Judging submissions: the program is taken out of the completion, every test is run, and the
verdicts become the contract's ``EvalResult``.

Functions are tested in a judge process of the jail; outputs are compared here, case by case, or by
the problem's checker; olympiad problems get a score for each subtask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ctrl_megatron.sandbox import wire
from ctrl_megatron.sandbox.comparison import difference
from ctrl_megatron.sandbox.languages import (
    PYTHON,
    ExtractedProgram,
    Language,
    extract_code,
    language_named,
)
from ctrl_megatron.sandbox.service.checker import OutputChecker
from ctrl_megatron.sandbox.service.datasets import READERS
from ctrl_megatron.sandbox.service.datasets.problems import (
    FunctionProblem,
    GradedProblem,
    ScoredProblem,
    StdioCase,
    StdioProblem,
)
from ctrl_megatron.sandbox.service.programs import (
    DEFAULT_CPP_STANDARD,
    STOP_REASONS,
    Program,
    ProgramRunner,
    run_response,
    seconds_within,
)

_LANGUAGE_REQUIRED = ("CommonOJDataset",)
_SHOWN = 1000
_LAX_STDIO = """
import io as _io, sys as _sys
_code, _cases = {code!r}, {cases!r}
for _given, _wanted in _cases:
    _sys.stdin, _sys.stdout = _io.StringIO(_given), _io.StringIO()
    try:
        exec(_code, {{"__name__": "__main__"}})
    except SystemExit:
        pass
    _got, _sys.stdout = _sys.stdout.getvalue(), _sys.__stdout__
    if _got.strip().lower().split() != _wanted.strip().lower().split():
        raise AssertionError("wrong answer")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request, read: what is judged, how and by whom."""

    runner: ProgramRunner
    request: wire.SubmitRequest
    problem: GradedProblem
    language: Language
    extracted: ExtractedProgram

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
    problem, language = submission.problem, submission.language
    mode = request.config.extra.get("lax", False)
    if mode not in (True, False, None, "compare"):
        raise ValueError(f"extra.lax must be true, false or 'compare', got {mode!r}"[:200])
    lax = None
    # Comparing outputs outside the program is the same in both.
    if mode and (
        isinstance(problem, FunctionProblem)
        or (isinstance(problem, StdioProblem) and problem.single)
    ):
        if language is not PYTHON:
            raise ValueError(f"extra.lax is for python, got language {language.name!r}")
        lax = await _grade_by_exit_status(submission, problem)
    if mode is True and lax is not None:
        return lax
    strict = await _grade_strictly(submission)
    if mode == "compare":
        agreed = strict.accepted if lax is None else lax.accepted
        forged = agreed and not strict.accepted
        strict.extra = {**(strict.extra or {}), "lax_accepted": agreed, "forged": forged}
    return strict


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
    # Reading may unpack megabytes: other requests go on meanwhile.
    problem = await asyncio.to_thread(READERS[kind], data)
    return Submission(
        runner=runner,
        request=request,
        problem=_first_cases(problem, config.extra.get("max_cases")),
        language=language,
        extracted=extract_code(request.completion, language),
    )


def _first_cases(problem: GradedProblem, most: Any) -> GradedProblem:
    if most is None:
        return problem
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"extra.max_cases must be a positive integer, got {most!r}"[:200])
    if isinstance(problem, StdioProblem):
        return replace(problem, cases=problem.cases[:most])
    if isinstance(problem, FunctionProblem):
        return replace(problem, tests=problem.tests[:most], cases=problem.cases[:most])
    raise ValueError("extra.max_cases does not fit a problem with subtasks")


async def _grade_strictly(submission: Submission) -> wire.EvalResult:
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
    program = await submission.runner.prepare(
        language,
        submission.extracted.code,
        compile_seconds=config.compile_timeout,
        standard=str(config.extra.get("cpp_standard", DEFAULT_CPP_STANDARD)),
        with_sources=sources,
        prelude=problem.prelude if isinstance(problem, StdioProblem) else "",
    )
    score_case = await _case_scorer(submission, problem, program)
    if isinstance(problem, ScoredProblem):
        return await _score_subtasks(submission, problem, score_case)

    async def judge_case(case: StdioCase) -> wire.EvalTestCase:
        return (await score_case(case))[0]

    # A program that did not compile costs nothing to run, but fails every case.
    verdicts = await _in_order(problem.cases, judge_case, submission.run_all)
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
    tests: Iterable[Any], run_test: Callable[[Any], Awaitable[wire.EvalTestCase]], run_all: bool
) -> list[wire.EvalTestCase]:
    """Verdicts in the order of the tests; without ``run_all`` they end at the first failure."""
    if run_all:
        return list(await asyncio.gather(*map(run_test, tests)))
    verdicts: list[wire.EvalTestCase] = []
    for test in tests:
        verdicts.append(await run_test(test))
        if not verdicts[-1].passed:
            break
    return verdicts


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
        "stubs": problem.stubs,
        "seconds": seconds_within(limits, submission.seconds),
        "memory_mb": limits.memory_mb,
        "run_all": run_all,
    }
    report = await submission.runner.pool.run(job, max(limits.job_seconds, job["seconds"]))
    verdicts = [_assert_verdict(problem, *row) for row in report["verdicts"]]
    ended = bool(verdicts) and not verdicts[-1].passed and not run_all
    stopped = report["stopped"] or ""
    status = "timeout" if "timeout" in stopped else "failed"
    reason = STOP_REASONS.get(stopped, "not run")
    while len(verdicts) < len(problem.tests) and not ended:
        verdicts.append(_assert_verdict(problem, len(verdicts), status, reason, None))
        status, reason = "failed", f"not run: {reason}"[:200]
        ended = not run_all
    return verdicts


def _assert_verdict(
    problem: FunctionProblem, index: int, status: str, reason: str, seconds: float | None
) -> wire.EvalTestCase:
    passed = status == "passed"
    run = run_response(
        code=int(not passed), timed_out=status == "timeout", seconds=seconds, stderr=reason
    )
    info = {"test": problem.tests[index][:_SHOWN], "reason": reason}
    if problem.cases:
        info |= problem.cases[index]
    return wire.EvalTestCase(passed=passed, exec_info=run, test_info=info)


CaseScorer = Callable[[StdioCase], Awaitable[tuple[wire.EvalTestCase, float]]]


async def _case_scorer(
    submission: Submission, problem: StdioProblem | ScoredProblem, program: Program
) -> CaseScorer:
    """Runs one case: the verdict, and its score in [0, 1]. What is expected never leaves the
    service, but to a checker.
    """
    checker = None
    if problem.checker is not None:
        checker = await OutputChecker.prepare(submission.runner, problem.checker)

    async def score_case(case: StdioCase) -> tuple[wire.EvalTestCase, float]:
        run = await submission.runner.run(program, stdin=case.input, seconds=submission.seconds)
        if run.failure:
            score, reason = 0.0, run.failure
        elif checker is not None:
            score, reason = await checker.score(case, run.stdout)
        else:
            reason = difference(run.stdout, case.output) or ""
            score = 0.0 if reason else 1.0
        info = {
            **case.labels,
            "input": case.input[:_SHOWN],
            "expected": case.output[:_SHOWN],
            "output": run.stdout[:_SHOWN],
            "reason": reason,
        }
        passed = score == 1 and run.response.status is wire.RunStatus.SUCCESS
        return wire.EvalTestCase(passed=passed, exec_info=run.response, test_info=info), score

    return score_case


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
        done = await asyncio.gather(*(score_case(problem.cases[name]) for name in names))
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


async def _grade_by_exit_status(
    submission: Submission, problem: FunctionProblem | StdioProblem
) -> wire.EvalResult:
    """The laxer grading of other services, to compare with: who leaves with status 0 has passed.

    The program and its tests run in one process, one per assert or one for a problem that answers
    with a single verdict, and its exit status is believed, as SandboxFusion does. Programs forge it
    with ``exit(0)``, an ``__eq__`` that always agrees, or by reading the tests. Never a reward:
    only a measure of how often that happens.
    """

    async def run_source(source: str) -> wire.EvalTestCase:
        program = Program(language=PYTHON, code=source, prelude=problem.prelude)
        run = await submission.runner.run(program, seconds=submission.seconds)
        info = {"test": source[-1000:], "reason": run.failure, "lax": True}
        passed = run.response.status is wire.RunStatus.SUCCESS
        return wire.EvalTestCase(passed=passed, exec_info=run.response, test_info=info)

    sources = _lax_sources(problem, submission.extracted.code)
    verdicts = await _in_order(sources, run_source, submission.run_all)
    accepted = len(verdicts) == len(sources) and all(verdict.passed for verdict in verdicts)
    return submission.result(verdicts, accepted=accepted, extra={"lax": True})


def _lax_sources(problem: FunctionProblem | StdioProblem, code: str) -> list[str]:
    if isinstance(problem, StdioProblem):
        cases = [(case.input, case.output) for case in problem.cases]
        return [_LAX_STDIO.format(code=code, cases=cases)]
    # What the program sees of the setup comes before it; the rest with the tests, as there.
    parts = [code, problem.adapter, problem.setup]
    if problem.single:
        return ["\n".join([*parts, *problem.tests])]
    return ["\n".join([*parts, test]) for test in problem.tests]
