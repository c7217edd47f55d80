"""Judges a program's outputs case by case, by comparison or by the problem's checker."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence

from ctrl_megatron.problems.comparison import output_difference
from ctrl_megatron.sandbox import wire
from ctrl_megatron.sandbox.datasets.problems import ScoredProblem, StdioCase, StdioProblem
from ctrl_megatron.sandbox.service.checker import OutputChecker
from ctrl_megatron.sandbox.service.jobs import STOP_REASONS, run_response
from ctrl_megatron.sandbox.service.programs import Program
from ctrl_megatron.sandbox.service.reading import run_in_reading_thread
from ctrl_megatron.sandbox.service.submission import SHORT, Submission

_AT_ONCE = 16
"""Tests of one request that run or wait at the same time."""
CaseScorer = Callable[[StdioCase], Awaitable[tuple[wire.EvalTestCase, float]]]


async def score_in_order(
    submission: Submission, cases: Sequence[StdioCase], score_case: CaseScorer
) -> list[tuple[wire.EvalTestCase, float]]:
    """Verdicts and scores in the order of the cases; without ``run_all`` they end at the first
    failure.

    At most ``_AT_ONCE`` cases are in progress, so that a request with hundreds of cases does not
    create a job for each. After ``max_timeouts`` cases that ran out of time the later cases fail
    without a run, as asserts do: otherwise a program that loops would occupy a worker for one time
    limit per case. When the problem's time is over every case without a verdict fails.
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
        if result[0].timed_out and not submission.compares_like_sandbox_fusion:
            late.append(number)
            if len(late) >= most:
                end = sorted(late)[most - 1] + 1
                for task in tasks[end:]:
                    task.cancel()
        if clock.is_over:
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
        (_not_run(case, submission.max_shown_characters, behind), 0.0)
        if number >= end
        else (_not_run(case, submission.max_shown_characters, over), 0.0)
        if task.cancelled()
        else task.result()
        for number, (task, case) in enumerate(zip(tasks, cases, strict=True))
    ]


def _not_run(case: StdioCase, shown: int, reason: str) -> wire.EvalTestCase:
    texts = {"input": case.input[:shown], "expected": case.output[:shown], "output": ""}
    run = run_response(code=1, timed_out=False, seconds=None, stderr=reason)
    info = {**case.labels, **texts, "reason": reason, "timed_out": True}
    return wire.EvalTestCase(passed=False, exec_info=run, test_info=info)


async def case_scorer(
    submission: Submission, problem: StdioProblem | ScoredProblem, program: Program
) -> CaseScorer:
    """A function that runs one case and returns the verdict and the score in [0, 1]. The expected
    output does not leave the service, except to a checker.
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
            if run.timed_out and clock.is_over:
                reason = STOP_REASONS["job_timeout"]
        elif checker is not None:
            score, reason, late = await checker.score(case, run.stdout)
        else:
            fold = isinstance(problem, StdioProblem) and problem.ignore_case
            compare = functools.partial(output_difference, ignore_case=fold)
            texts = run.stdout, case.output
            # Comparing a megabyte of numbers takes a second.
            reason = (
                compare(*texts, problem.rule)
                if len(run.stdout) < SHORT
                else await run_in_reading_thread(compare, *texts, problem.rule)
            ) or ""
            score = 0.0 if reason else 1.0
        shown = submission.max_shown_characters
        info = {
            **case.labels,
            "input": case.input[:shown],
            "expected": case.output[:shown],
            "output": run.stdout[:shown],
            "reason": reason[:shown],
            **({"timed_out": True} if late else {}),
        }
        passed = score == 1 and run.response.status is wire.RunStatus.SUCCESS
        run_info = _cut(run.response, shown)
        return wire.EvalTestCase(passed=passed, exec_info=run_info, test_info=info), score

    return score_case


def _cut(response: wire.RunCodeResponse, shown: int) -> wire.RunCodeResponse:
    """Shorten the texts of a run for its verdict, so that many cases with large outputs do not fill
    the service's memory. Of errors the last lines are kept, which say most.
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
