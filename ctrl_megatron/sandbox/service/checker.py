"""Special judges: a program of the problem decides whether an output answers an input.

It runs in a job of its own, as confined as the program it judges, with three files. Its verdict:
exit status 1 or 2 rejects; with status 0 the first word that it prints is the score, a number from
0 to 1, and printing nothing means 1. Whatever else it does, it has broken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ctrl_megatron.sandbox.datasets.problems import CheckerProgram, StdioCase
from ctrl_megatron.sandbox.languages import language_named
from ctrl_megatron.sandbox.service.programs import Program, ProgramRun, ProgramRunner, to_base64
from ctrl_megatron.sandbox.service.workers import WorkerFault

_REJECTS = (1, 2)
"""Exit statuses that mean a wrong answer, as testlib has them; others mean that it broke."""


@dataclass(frozen=True, slots=True)
class OutputChecker:
    """A checker that is ready to run."""

    _runner: ProgramRunner
    _checker: CheckerProgram
    _program: Program

    @classmethod
    async def prepare(cls, runner: ProgramRunner, checker: CheckerProgram) -> OutputChecker:
        """Compile where needed. Raises ``ValueError`` for a checker that cannot be used."""
        program = await runner.prepare(language_named(checker.language), checker.code)
        if program.not_compiled is not None:
            raise ValueError(f"provided_data.checker: {program.not_compiled.failure}")
        return cls(runner, checker, program)

    async def score(self, case: StdioCase, output: str) -> tuple[float, str]:
        """Score in [0, 1] and why it is not 1. Raises ``ValueError`` for a checker that fails."""
        run = await self._run(case, output)
        scored = _read_score(run)
        if scored is not None:
            return scored
        # Did this output break the checker, or is the checker broken?
        reference = await self._run(case, case.output)
        verdict = _read_score(reference)
        if verdict is None and reference.timed_out:
            raise WorkerFault("provided_data.checker ran out of time on the reference answer")
        if verdict is None or verdict[0] < 1:
            raise ValueError(
                f"provided_data.checker fails on the reference answer: {_account(reference)}"
            )
        return 0.0, f"the checker broke on this output: {_account(run)}"

    async def _run(self, case: StdioCase, output: str) -> ProgramRun:
        texts = {"input": case.input, "answer": case.output, "output": output}
        return await self._runner.run(
            self._program,
            seconds=self._checker.seconds,
            contents={f"{name}.txt": to_base64(text) for name, text in texts.items()},
            arguments=[f"{name}.txt" for name in self._checker.order],
        )


def _read_score(run: ProgramRun) -> tuple[float, str] | None:
    """None for a checker that broke."""
    result = run.response.run_result
    if result is not None and result.return_code in _REJECTS:
        text = ((result.stderr or "").strip() or run.stdout.strip()).rpartition("\n")[2]
        return 0.0, f"rejected by the checker: {text}"[:1000]
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
    return score, "" if score == 1 else f"score {score:g} by the checker: {text}"[:1000]


def _account(run: ProgramRun) -> str:
    """What a checker that broke did."""
    return run.failure or f"it printed {run.stdout.strip()[:100]!r}, which is no score from 0 to 1"
