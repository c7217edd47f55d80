"""Special judges: a program of the problem decides whether an output answers an input.

It runs in a job of its own, as confined as the program it judges, with three files. Its verdict:
exit status 1 or 2 rejects; with status 0 the first word that it prints is the score, a number from
0 to 1, and printing nothing means 1. Whatever else it does, it has broken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ctrl_megatron.sandbox.datasets.problems import CheckerProgram, StdioCase
from ctrl_megatron.sandbox.languages import language_named
from ctrl_megatron.sandbox.service.problem_clock import ProblemClock
from ctrl_megatron.sandbox.service.programs import (
    STOP_REASONS,
    Program,
    ProgramRun,
    ProgramRunner,
    to_base64,
)
from ctrl_megatron.sandbox.service.workers import WorkerFault

_REJECTS = (1, 2)
"""Exit statuses that mean a wrong answer, as testlib has them; others mean that it broke."""


class CheckerScore(NamedTuple):
    """What a checker says of one output."""

    score: float
    """In [0, 1]."""
    reason: str
    """Why it is not 1."""
    timed_out: bool = False
    """The checker's time decided it."""


@dataclass(frozen=True, slots=True)
class OutputChecker:
    """A checker that is ready to run; what it takes of time is counted by the problem's clock."""

    _runner: ProgramRunner
    _checker: CheckerProgram
    _program: Program
    _clock: ProblemClock

    @classmethod
    async def prepare(
        cls, runner: ProgramRunner, checker: CheckerProgram, clock: ProblemClock
    ) -> OutputChecker:
        """Compile where needed. Raises ``ValueError`` for a checker that cannot be used,
        ``WorkerFault`` for one that the compiler did not finish in time.
        """
        program = await runner.prepare(language_named(checker.language), checker.code)
        if program.not_compiled is not None:
            trouble = f"provided_data.checker: {program.not_compiled.failure}"
            raise WorkerFault(trouble) if program.not_compiled.timed_out else ValueError(trouble)
        return cls(runner, checker, program, clock)

    async def score(self, case: StdioCase, output: str) -> CheckerScore:
        """How good ``output`` is. Raises ``ValueError`` for a checker that fails."""
        run = await self._run(case, output)
        scored = _read_score(run)
        if scored is not None:
            return scored
        # Did this output break the checker, or is the checker broken?
        reference = await self._run(case, case.output)
        if self._clock.over:
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
    """None for a checker that broke."""
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
    """What a checker that broke did."""
    return run.failure or f"it printed {run.stdout.strip()[:100]!r}, which is no score from 0 to 1"
