"""A request to judge a completion after reading: the problem, the program, and how to judge it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ctrl_megatron.problems.comparison import SANDBOX_FUSION
from ctrl_megatron.sandbox import wire
from ctrl_megatron.sandbox.datasets.problems import FunctionProblem, GradedProblem
from ctrl_megatron.sandbox.languages import ExtractedProgram, Language, extract_program
from ctrl_megatron.sandbox.limits import CASE_CHARACTERS, VERDICT_CHARACTERS
from ctrl_megatron.sandbox.service.problem_clock import ProblemClock
from ctrl_megatron.sandbox.service.programs import ProgramRunner
from ctrl_megatron.sandbox.service.reading import run_in_reading_thread
from ctrl_megatron.sandbox.task import read_task

_TEXTS_OF_CASE = 6
"""Texts in a verdict: output and errors, and in its ``test_info`` input, expected output, output
and reason."""
SHORT = 8192
"""Characters; longer completions and outputs are processed in another thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request after reading: the problem, the program, and how to judge it."""

    runner: ProgramRunner
    request: wire.SubmitRequest
    problem: GradedProblem
    language: Language
    extracted: ExtractedProgram
    clock: ProblemClock

    @property
    def max_shown_characters(self) -> int:
        """Characters shown of each text in a verdict; the size of an answer is bounded for any
        number of cases.
        """
        cases = (
            self.problem.tests if isinstance(self.problem, FunctionProblem) else self.problem.cases
        )
        return min(CASE_CHARACTERS, VERDICT_CHARACTERS // (_TEXTS_OF_CASE * len(cases)) + 1)

    @property
    def compares_like_sandbox_fusion(self) -> bool:
        """Whether to compare as SandboxFusion does, for comparisons of services; never used for a
        reward.
        """
        return self.request.config.extra.get("compatibility") == SANDBOX_FUSION.name

    @property
    def run_all(self) -> bool:
        """Whether to judge every test instead of stopping at the first failure."""
        return bool(self.request.config.extra.get("run_all_cases", False))

    @property
    def seconds(self) -> float | None:
        """Seconds of processor time of one test; None means the service's default."""
        asked = self.request.config.run_timeout
        return self.problem.seconds if asked is None else asked

    def result(
        self,
        verdicts: Iterable[wire.EvalTestCase],
        *,
        accepted: bool,
        extra: dict[str, Any] | None = None,
    ) -> wire.EvalResult:
        problem, code = self.problem, self.extracted.code
        functions = isinstance(problem, FunctionProblem)
        return wire.EvalResult(
            id=self.request.id,
            accepted=accepted,
            extracted_code=code,
            full_code=code + problem.adapter if functions else code,
            test_code="\n".join(problem.tests) if functions else None,
            tests=list(verdicts),
            extracted_type=self.extracted.found_by,
            extra=extra,
        )


async def read_submission(runner: ProgramRunner, request: wire.SubmitRequest) -> Submission:
    """Read a request. Raises ``ValueError`` for one that cannot be judged."""
    # Reading may unpack megabytes, so it must not block the event loop.
    task = await run_in_reading_thread(read_task, request, runner.limits)
    extracted = (
        extract_program(request.completion, task.language)
        if len(request.completion) < SHORT
        else await run_in_reading_thread(extract_program, request.completion, task.language)
    )
    return Submission(
        runner=runner,
        request=request,
        problem=task.problem,
        language=task.language,
        extracted=extracted,
        clock=ProblemClock(task.seconds, runner.limits.wall_factor),
    )
