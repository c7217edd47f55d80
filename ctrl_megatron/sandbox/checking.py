"""Special judges: a program of the problem decides whether an output answers an input.

It runs in a job of its own, as confined as the program it judges, with three files. Its verdict: an
exit status other than 0 rejects; otherwise a first line that is a number from 0 to 1 is the score,
and no such line means 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from ctrl_megatron.sandbox.datasets.problems import Case, Checker
from ctrl_megatron.sandbox.execution import Executor, Program, Ran, as_file
from ctrl_megatron.sandbox.languages.registry import language_named

_REJECTS = (1, 2)
"""Exit statuses that mean a wrong answer, as testlib has them; others mean that it broke."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """What a checker says: a score in [0, 1], and why it is not 1."""

    score: float
    reason: str


class SpecialJudge:
    """A checker that is ready to run."""

    def __init__(self, executor: Executor, checker: Checker, program: Program) -> None:
        self._executor = executor
        self._checker = checker
        self._program = program

    @classmethod
    async def prepare(cls, executor: Executor, checker: Checker) -> SpecialJudge:
        """Compile where needed. Raises ``ValueError`` for a checker that cannot be used."""
        language = language_named(checker.language)
        program = await executor.prepare(language, checker.code)
        if program.broken is not None:
            said = Ran(program.broken, True).failure
            raise ValueError(f"provided_data.checker: {said}")
        return cls(executor, checker, program)

    async def opinion(self, case: Case, output: str) -> Opinion:
        """Judge ``output``. Raises ``ValueError`` where the checker fails on the reference too."""
        ran = await self._run(case, output)
        opinion = _read(ran)
        if opinion is not None:
            return opinion
        # Did this output break the checker, or is the checker broken?
        reference = _read(await self._run(case, case.output))
        if reference is None or reference.score < 1:
            raise ValueError(f"provided_data.checker fails on the reference answer: {ran.failure}")
        return Opinion(0.0, f"the checker broke on this output: {ran.failure}")

    async def _run(self, case: Case, output: str) -> Ran:
        texts = {"input": case.input, "answer": case.output, "output": output}
        return await self._executor.run(
            self._program,
            seconds=self._checker.seconds,
            contents={f"{name}.txt": as_file(text) for name, text in texts.items()},
            arguments=[f"{name}.txt" for name in self._checker.order],
        )


def _read(ran: Ran) -> Opinion | None:
    """None for a checker that broke."""
    run = ran.response.run_result
    if run is not None and run.return_code in _REJECTS:
        said = ((run.stderr or "").strip() or ran.stdout.strip()).rpartition("\n")[2]
        return Opinion(0.0, f"rejected by the checker: {said}"[:1000])
    if run is None or run.return_code != 0:
        return None
    first, _, rest = ran.stdout.strip().partition("\n")
    try:
        score = float(first)
    except ValueError:
        return Opinion(1.0, "")
    if not 0 <= score <= 1:
        return Opinion(1.0, "")
    said = (run.stderr or "").strip() or rest.strip()
    reason = "" if score == 1 else f"score {score:g} by the checker: {said}"[:1000]
    return Opinion(score, reason)
