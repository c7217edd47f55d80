"""Judges submissions: runs every test of a problem and returns the verdicts as the contract's
``EvalResult``.

Functions are tested in a judge process of the jail, programs case by case (``cases``). Problems of
olympiads get a score per subtask.
"""

from __future__ import annotations

import re
from typing import Any

from ctrl_megatron.problems.comparison import SANDBOX_FUSION
from ctrl_megatron.sandbox import wire
from ctrl_megatron.sandbox.datasets.problems import FunctionProblem, ScoredProblem, StdioProblem
from ctrl_megatron.sandbox.service.cases import CaseScorer, case_scorer, score_in_order
from ctrl_megatron.sandbox.service.compiler import DEFAULT_CPP_STANDARD
from ctrl_megatron.sandbox.service.jobs import STOP_REASONS, run_response
from ctrl_megatron.sandbox.service.programs import ProgramRunner
from ctrl_megatron.sandbox.service.submission import Submission, read_submission


async def grade_submission(runner: ProgramRunner, request: wire.SubmitRequest) -> wire.EvalResult:
    """Judge one submission. Raises ``ValueError`` (bad request), ``WorkerFault``, ``QueueFull``."""
    submission = await read_submission(runner, request)
    result = await _judge(submission)
    if submission.compares_like_sandbox_fusion:
        result.extra = {**(result.extra or {}), "compatibility": SANDBOX_FUSION.name}
    return result


async def _judge(submission: Submission) -> wire.EvalResult:
    problem, language, config = submission.problem, submission.language, submission.request.config
    if isinstance(problem, FunctionProblem):
        verdicts, total = await _test_functions(submission, problem)
        return _all_or_one(submission, verdicts, total, single=problem.single)
    sources = problem.sources if isinstance(problem, ScoredProblem) else {}
    limits, clock = submission.runner.limits, submission.clock
    compiling = limits.test_seconds if config.compile_timeout is None else config.compile_timeout
    program = await submission.runner.prepare(
        language,
        submission.extracted.code,
        compile_seconds=min(compiling, clock.seconds_left),
        standard=str(config.extra.get("cpp_standard", DEFAULT_CPP_STANDARD)),
        with_sources=sources,
        prelude=problem.prelude if isinstance(problem, StdioProblem) else "",
    )
    if program.compilation is not None:
        # The time of the original compilation counts, so that a program that was compiled before
        # has no advantage.
        clock.spend(program.compilation.result.execution_time or 0.0)
    score_case = await case_scorer(submission, problem, program)
    if isinstance(problem, ScoredProblem):
        return await _score_subtasks(submission, problem, score_case)

    # A program that did not compile fails every case without a run.
    scored = await score_in_order(submission, problem.cases, score_case)
    verdicts = [verdict for verdict, _ in scored]
    return _all_or_one(submission, verdicts, len(problem.cases), single=problem.single)


def _all_or_one(
    submission: Submission, verdicts: list[wire.EvalTestCase], total: int, *, single: bool
) -> wire.EvalResult:
    """The answer for a problem that is accepted if all of ``total`` tests passed. With ``single``
    one verdict represents all: the first failure, or the last success.
    """
    passed = [verdict.passed for verdict in verdicts]
    accepted = len(verdicts) == total and all(passed)
    if not single:
        return submission.result(verdicts, accepted=accepted)
    first = next((verdict for verdict in verdicts if not verdict.passed), verdicts[-1])
    info = {**(first.test_info or {}), "passed_tests": sum(passed), "tests": total}
    one = first.model_copy(update={"test_info": info})
    return submission.result([one], accepted=accepted, extra={"verdicts": passed})


async def _test_functions(
    submission: Submission, problem: FunctionProblem
) -> tuple[list[wire.EvalTestCase], int]:
    """Run every test in a judge, with the program in another process. Returns the verdicts, and the
    number of tests, which is known once texts with unit tests have been executed.

    A missing verdict, because the job was cut short, is a failure.
    """
    limits, run_all = submission.runner.limits, submission.run_all
    seconds = limits.validated_test_seconds(submission.seconds)
    code = submission.extracted.code + problem.adapter
    job = {
        "kind": "asserts",
        "code": code,
        "prelude": problem.prelude,
        "setup": problem.setup,
        "tests": problem.tests,
        "uncounted": problem.uncounted,
        "stubs": problem.stubs,
        "modules": problem.modules,
        "classes": [name for name in problem.classes if re.search(rf"\b{name}\b", code)],
        "seconds": seconds,
        "wall_seconds": seconds * limits.wall_factor,
        "memory_mb": limits.memory_mb,
        "run_all": run_all,
        "problem_seconds": submission.clock.seconds_left,
    }
    clock = submission.clock
    report = await submission.runner.pool.run(job, clock.seconds_left, clock)
    shown = submission.max_shown_characters
    verdicts = [_assert_verdict(problem, shown, *row) for row in report["verdicts"]]
    texts = len(problem.tests) - len(problem.uncounted)
    total = max(texts if report["tests"] < 0 else report["tests"], len(verdicts))
    ended = bool(verdicts) and not verdicts[-1].passed and not run_all
    stopped = report["stopped"] or ""
    late = "timeout" in stopped
    status, behind = ("timeout", "not_run") if late else ("failed", "failed")
    reason = STOP_REASONS.get(stopped, "not run")
    while len(verdicts) < total and not ended:
        verdicts.append(_assert_verdict(problem, shown, len(verdicts), status, reason, None, ""))
        if status != behind:
            status, reason = behind, f"not run: {reason}"[:200]
        ended = not run_all
    return verdicts, total


def _assert_verdict(
    problem: FunctionProblem,
    shown: int,
    index: int,
    status: str,
    reason: str,
    seconds: float | None,
    test: str,
) -> wire.EvalTestCase:
    passed = status == "passed"
    run = run_response(
        code=int(not passed), timed_out=status == "timeout", seconds=seconds, stderr=reason
    )
    if not test and not problem.uncounted and index < len(problem.tests):
        test = problem.tests[index]
    info: dict[str, Any] = {"test": test[:shown], "reason": reason}
    if status == "not_run":
        info["timed_out"] = True
    if status == "unjudgeable":
        info["unjudgeable"] = True
    if problem.cases:
        info |= {name: text[:shown] for name, text in problem.cases[index].items()}
    return wire.EvalTestCase(passed=passed, exec_info=run, test_info=info)


async def _score_subtasks(
    submission: Submission, problem: ScoredProblem, score_case: CaseScorer
) -> wire.EvalResult:
    """Score each subtask by the lowest score of its tests; accepted with full points.

    A test that several subtasks share runs once. Without ``run_all`` a subtask ends at its first
    test with score 0; the other subtasks are still scored.
    """
    verdicts: dict[str, tuple[wire.EvalTestCase, float]] = {}
    if submission.run_all:
        names = list(dict.fromkeys(name for task in problem.subtasks for name in task.tests))
        done = await score_in_order(submission, [problem.cases[name] for name in names], score_case)
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
