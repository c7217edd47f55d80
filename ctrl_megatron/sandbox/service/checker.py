"""Special judges: a program of the problem decides whether an output answers an input.

It runs in a job of its own, as confined as the program it judges, with three files. Its verdict: an
exit status other than 0 rejects; otherwise a first line that is a number from 0 to 1 is the score,
and no such line means 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from ctrl_megatron.sandbox.languages import language_named
from ctrl_megatron.sandbox.service.datasets.problems import CheckerProgram, StdioCase
from ctrl_megatron.sandbox.service.programs import Program, ProgramRun, ProgramRunner, to_base64

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
        reference = _read_score(await self._run(case, case.output))
        if reference is None or reference[0] < 1:
            raise ValueError(f"provided_data.checker fails on the reference answer: {run.failure}")
        return 0.0, f"the checker broke on this output: {run.failure}"

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
    first, _, rest = run.stdout.strip().partition("\n")
    try:
        score = float(first)
    except ValueError:
        return 1.0, ""
    if not 0 <= score <= 1:
        return 1.0, ""
    text = (result.stderr or "").strip() or rest.strip()
    return score, "" if score == 1 else f"score {score:g} by the checker: {text}"[:1000]
