"""From a problem and a program to verdicts: functions in the judge, outputs case by case, subtasks
by score.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ctrl_megatron.sandbox import jobs
from ctrl_megatron.sandbox.checking import Opinion, SpecialJudge
from ctrl_megatron.sandbox.datasets.problems import (
    Case,
    FunctionProblem,
    Problem,
    ScoredProblem,
    StdioProblem,
)
from ctrl_megatron.sandbox.execution import Executor, Program
from ctrl_megatron.sandbox.stdio import difference
from ctrl_megatron.sandbox.wire import EvalTestCase, RunStatus

_SHOWN = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Verdicts in order; a prefix that ends at the first failure where not all were asked for."""

    cases: tuple[EvalTestCase, ...]
    total: int
    extra: dict[str, Any] | None = None
    accepted: bool | None = None
    """None: accepted when all of ``total`` passed."""

    @property
    def passed(self) -> bool:
        """Whether the whole submission is accepted."""
        if self.accepted is not None:
            return self.accepted
        return len(self.cases) == self.total and all(case.passed for case in self.cases)

    def as_one(self) -> Judged:
        """One verdict that answers for all: the first failure, or the last success."""
        first = next((case for case in self.cases if not case.passed), self.cases[-1])
        verdicts = [case.passed for case in self.cases]
        info = {**(first.test_info or {}), "passed_tests": sum(verdicts), "tests": self.total}
        one = first.model_copy(update={"passed": self.passed, "test_info": info})
        return Judged(cases=(one,), total=1, extra={**(self.extra or {}), "verdicts": verdicts})


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a request asks for. ``seconds`` is the wall clock of one test."""

    seconds: float | None
    run_all: bool

    def seconds_for(self, problem: Problem) -> float | None:
        """Wall clock of one test of ``problem``; None leaves it to the service's limits."""
        return problem.seconds if self.seconds is None else self.seconds


async def judge_functions(
    executor: Executor, problem: FunctionProblem, code: str, terms: Terms
) -> Judged:
    """Every test runs in the judge, with the program in another process."""
    limits, tests = executor.limits, problem.tests
    seconds = terms.seconds_for(problem)
    job = jobs.asserts_job(
        limits, code + problem.adapter, tests, seconds=seconds, run_all=terms.run_all
    )
    result = await executor.run_job(job, max(limits.job_seconds, job["seconds"]))
    cases = jobs.assert_cases(tests, result.verdicts, result.end["stopped"], terms.run_all)
    if problem.cases:
        cases = [
            case.model_copy(update={"test_info": {**(case.test_info or {}), **shown}})
            for case, shown in zip(cases, problem.cases, strict=False)
        ]
    return Judged(cases=tuple(cases), total=len(tests.tests))


async def judge_outputs(
    executor: Executor, problem: StdioProblem, program: Program, terms: Terms
) -> Judged:
    """One run per case; what is expected never leaves the service, but to a checker."""
    one_case = await _case_judge(executor, problem, program, terms)
    total = len(problem.cases)
    if program.broken is not None:
        cases = problem.cases if terms.run_all else problem.cases[:1]
        return Judged(cases=tuple([(await one_case(case))[0] for case in cases]), total=total)
    if terms.run_all:
        done = await asyncio.gather(*(one_case(case) for case in problem.cases))
        return Judged(cases=tuple(verdict for verdict, _ in done), total=total)
    judged: list[EvalTestCase] = []
    for case in problem.cases:
        judged.append((await one_case(case))[0])
        if not judged[-1].passed:
            break
    return Judged(cases=tuple(judged), total=total)


async def judge_scored(
    executor: Executor, problem: ScoredProblem, program: Program, terms: Terms
) -> Judged:
    """Score each subtask by the least score of its tests; accepted with all points.

    A test that several subtasks share runs once. Without ``run_all`` a subtask ends at its first
    test without a score, the others are still scored.
    """
    one_case = await _case_judge(executor, problem, program, terms)
    known: dict[str, tuple[EvalTestCase, float]] = {}
    wanted = [name for subtask in problem.subtasks for name in subtask.tests]
    if terms.run_all:
        names = list(dict.fromkeys(wanted))
        done = await asyncio.gather(*(one_case(problem.cases[name]) for name in names))
        known = dict(zip(names, done, strict=True))
    scores: list[dict[str, Any]] = []
    for subtask in problem.subtasks:
        least = 1.0
        for name in subtask.tests:
            if name not in known:
                known[name] = await one_case(problem.cases[name])
            least = min(least, known[name][1])
            if least == 0 and not terms.run_all:
                break
        scores.append(
            {"name": subtask.name, "points": subtask.points, "score": subtask.points * least}
        )
    score, full = (sum(item[key] for item in scores) for key in ("score", "points"))
    cases = tuple(_named(name, *verdict) for name, verdict in known.items())
    return Judged(
        cases=cases,
        total=len(set(wanted)),
        extra={"score": score, "max_score": full, "subtasks": scores},
        accepted=all(item["score"] == item["points"] for item in scores),
    )


CaseJudge = Callable[[Case], Awaitable[tuple[EvalTestCase, float]]]


async def _case_judge(
    executor: Executor, problem: StdioProblem | ScoredProblem, program: Program, terms: Terms
) -> CaseJudge:
    seconds = terms.seconds_for(problem)
    special = None
    if problem.checker is not None:
        special = await SpecialJudge.prepare(executor, problem.checker)

    async def one_case(case: Case) -> tuple[EvalTestCase, float]:
        ran = await executor.run(program, stdin=case.input, seconds=seconds)
        if ran.failure:
            opinion = Opinion(0.0, ran.failure)
        elif special is not None:
            opinion = await special.opinion(case, ran.stdout)
        else:
            reason = difference(ran.stdout, case.output)
            opinion = Opinion(0.0 if reason else 1.0, reason or "")
        info = {
            **case.labels,
            "input": case.input[:_SHOWN],
            "expected": case.output[:_SHOWN],
            "output": ran.stdout[:_SHOWN],
            "reason": opinion.reason,
        }
        passed = opinion.score == 1 and ran.response.status is RunStatus.SUCCESS
        verdict = EvalTestCase(passed=passed, exec_info=ran.response, test_info=info)
        return verdict, opinion.score

    return one_case


def _named(name: str, verdict: EvalTestCase, score: float) -> EvalTestCase:
    info = {**(verdict.test_info or {}), "name": name, "score": score}
    return verdict.model_copy(update={"test_info": info})
