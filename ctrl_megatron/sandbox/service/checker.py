"""Checkers (special judges): a program of the problem decides whether an output is right.

It runs as a job of its own, confined like the program that it judges, and gets three files. Exit
status 1 or 2 rejects the output. With status 0 the first word that it prints is the score, a number
from 0 to 1; no output means 1. In any other case the checker has broken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ctrl_megatron.sandbox.datasets.problems import CheckerProgram, StdioCase
from ctrl_megatron.sandbox.languages import language_named
from ctrl_megatron.sandbox.service.jobs import STOP_REASONS, to_base64
from ctrl_megatron.sandbox.service.problem_clock import ProblemClock
from ctrl_megatron.sandbox.service.programs import Program, ProgramRun, ProgramRunner
from ctrl_megatron.sandbox.service.worker import WorkerFault

_REJECTS = (1, 2)
"""Exit statuses of testlib for a wrong answer; any other means that the checker broke."""


class CheckerScore(NamedTuple):
    """A checker's score of one output."""

    score: float
    """In [0, 1]."""
    reason: str
    """Why the score is not 1; empty if it is."""
    timed_out: bool = False
    """The checker's time limit decided the score."""


@dataclass(frozen=True, slots=True)
class OutputChecker:
    """A checker that is ready to run. Its time counts on the problem's clock."""

    _runner: ProgramRunner
    _checker: CheckerProgram
    _program: Program
    _clock: ProblemClock

    @classmethod
    async def prepare(
        cls, runner: ProgramRunner, checker: CheckerProgram, clock: ProblemClock
    ) -> OutputChecker:
        """Compile the checker if its language requires it. Raises ``ValueError`` for a checker that
        cannot be used, ``WorkerFault`` if the compiler ran out of time.
        """
        program = await runner.prepare(language_named(checker.language), checker.code)
        if program.failed_compilation_run is not None:
            trouble = f"provided_data.checker: {program.failed_compilation_run.failure}"
            raise (
                WorkerFault(trouble)
                if program.failed_compilation_run.timed_out
                else ValueError(trouble)
            )
        return cls(runner, checker, program, clock)

    async def score(self, case: StdioCase, output: str) -> CheckerScore:
        """The score of ``output``. Raises ``ValueError`` for a checker that fails on the reference
        answer.
        """
        run = await self._run(case, output)
        scored = _read_score(run)
        if scored is not None:
            return scored
        # Find out whether the output or the checker itself is at fault.
        reference = await self._run(case, case.output)
        if self._clock.is_over:
            return CheckerScore(0.0, STOP_REASONS["job_timeout"], timed_out=True)
        verdict = _read_score(reference)
        if verdict is None and reference.timed_out:
            raise WorkerFault("provided_data.checker ran out of time on the reference answer")
        if verdict is None or verdict.score < 1:
            raise ValueError(
                f"provided_data.checker fails on the reference answer: {_account(reference)}"
            )
        text = f"the checker broke on this output: {_account(run)}"
        return CheckerScore(0.0, text, run.timed_out)

    async def _run(self, case: StdioCase, output: str) -> ProgramRun:
        texts = {"input": case.input, "answer": case.output, "output": output}
        return await self._runner.run(
            self._program,
            seconds=self._checker.seconds,
            contents={f"{name}.txt": to_base64(text) for name, text in texts.items()},
            arguments=[f"{name}.txt" for name in self._checker.order],
            clock=self._clock,
        )


def _read_score(run: ProgramRun) -> CheckerScore | None:
    """The checker's score, None if the checker broke."""
    result = run.response.run_result
    if result is not None and result.return_code in _REJECTS:
        text = ((result.stderr or "").strip() or run.stdout.strip()).rpartition("\n")[2]
        return CheckerScore(0.0, f"rejected by the checker: {text}"[:1000])
    if result is None or result.return_code != 0:
        return None
    first, *rest = run.stdout.split(maxsplit=1) or ["1"]
    try:
        score = float(first)
    except ValueError:
        return None
    if not (math.isfinite(score) and 0 <= score <= 1):
        return None
    text = (result.stderr or "").strip() or "".join(rest).strip()
    return CheckerScore(
        score, "" if score == 1 else f"score {score:g} by the checker: {text}"[:1000]
    )


def _account(run: ProgramRun) -> str:
    """Describe the run of a broken checker."""
    return run.failure or f"it printed {run.stdout.strip()[:100]!r}, which is no score from 0 to 1"
