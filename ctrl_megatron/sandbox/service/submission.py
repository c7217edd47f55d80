"""A request to judge a completion after reading: the problem, the program, and how to judge it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ctrl_megatron.problems.comparison import SANDBOX_FUSION
from ctrl_megatron.sandbox import wire
from ctrl_megatron.sandbox.datasets import READERS
from ctrl_megatron.sandbox.datasets.problems import FunctionProblem, GradedProblem, StdioProblem
from ctrl_megatron.sandbox.languages import (
    PYTHON,
    ExtractedProgram,
    Language,
    extract_code,
    language_named,
)
from ctrl_megatron.sandbox.limits import CASE_CHARACTERS, VERDICT_CHARACTERS
from ctrl_megatron.sandbox.service.jobs import problem_seconds_within, seconds_within
from ctrl_megatron.sandbox.service.problem_clock import ProblemClock
from ctrl_megatron.sandbox.service.programs import ProgramRunner
from ctrl_megatron.sandbox.service.reading import in_thread

_LANGUAGE_REQUIRED = ("CommonOJDataset",)
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
    def shown(self) -> int:
        """Characters shown of each text in a verdict; the size of an answer is bounded for any
        number of cases.
        """
        cases = (
            self.problem.tests if isinstance(self.problem, FunctionProblem) else self.problem.cases
        )
        return min(CASE_CHARACTERS, VERDICT_CHARACTERS // (_TEXTS_OF_CASE * len(cases)) + 1)

    @property
    def compatible(self) -> bool:
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


async def read_submission(runner: ProgramRunner, request: wire.SubmitRequest) -> Submission:
    """Read a request. Raises ``ValueError`` for one that cannot be judged."""
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
    compatibility = config.extra.get("compatibility")
    if compatibility not in (None, SANDBOX_FUSION.name):
        raise ValueError(
            f"extra.compatibility must be {SANDBOX_FUSION.name!r}, got {compatibility!r}"[:200]
        )
    if compatibility is not None:
        data = {**data, "first_of_list": True}
    # Reading may unpack megabytes, so it must not block the event loop.
    problem = await in_thread(READERS[kind], data)
    if compatibility is not None and not isinstance(problem, FunctionProblem):
        problem = replace(problem, rule=SANDBOX_FUSION)
    asked = problem.seconds if config.run_timeout is None else config.run_timeout
    seconds = problem_seconds_within(
        runner.limits, config.extra.get("problem_seconds"), seconds_within(runner.limits, asked)
    )
    extracted = (
        extract_code(request.completion, language)
        if len(request.completion) < SHORT
        else await in_thread(extract_code, request.completion, language)
    )
    return Submission(
        runner=runner,
        request=request,
        problem=_first_cases(problem, config.extra.get("max_cases")),
        language=language,
        extracted=extracted,
        clock=ProblemClock(seconds, runner.limits.wall_factor),
    )


def _first_cases(problem: GradedProblem, most: Any) -> GradedProblem:
    if most is None:
        return problem
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ValueError(f"extra.max_cases must be a positive integer, got {most!r}"[:200])
    if isinstance(problem, StdioProblem):
        return replace(problem, cases=problem.cases[:most])
    if isinstance(problem, FunctionProblem):
        return replace(
            problem,
            tests=problem.tests[:most],
            marked=problem.marked[:most],
            cases=problem.cases[:most],
        )
    raise ValueError("extra.max_cases does not fit a problem with subtasks")
