"""The task of a request to judge, read without running anything: the service reads every request
here, and a trainer its rows before it starts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ctrl_megatron.problems.comparison import SANDBOX_FUSION
from ctrl_megatron.sandbox import wire
from ctrl_megatron.sandbox.datasets import READERS
from ctrl_megatron.sandbox.datasets.problems import (
    FunctionProblem,
    GradedProblem,
    ScoredProblem,
    StdioProblem,
)
from ctrl_megatron.sandbox.languages import PYTHON, Language, language_named
from ctrl_megatron.sandbox.limits import CHECKED_BYTES, JSON_VALUES, SandboxLimits

_LANGUAGE_REQUIRED = ("CommonOJDataset",)
_PROGRAM_BYTES = 1 << 20
"""Bytes that a request may need for its program beside the tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingTask:
    """A request as it is judged."""

    problem: GradedProblem
    language: Language
    seconds: float
    """Seconds of workers' time for the whole problem."""


def read_task(request: wire.SubmitRequest, limits: SandboxLimits) -> GradingTask:
    """The task of ``request``. Raises ``ValueError`` for one that cannot be judged."""
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
    problem = READERS[kind](data)
    if compatibility is not None and not isinstance(problem, FunctionProblem):
        problem = replace(problem, rule=SANDBOX_FUSION)
    _require_languages(problem, language)
    asked = problem.seconds if config.run_timeout is None else config.run_timeout
    seconds = limits.validated_problem_seconds(
        config.extra.get("problem_seconds"), limits.validated_test_seconds(asked)
    )
    problem = _first_cases(problem, config.extra.get("max_cases"))
    return GradingTask(problem=problem, language=language, seconds=seconds)


def require_judgeable(request: wire.SubmitRequest, limits: SandboxLimits | None) -> None:
    """Raise ``ValueError`` for a request that no service with ``limits`` would judge, whatever its
    program; with None no limit of a service counts.
    """
    read_task(request, SandboxLimits(max_test_seconds=float("inf")) if limits is None else limits)
    body = request.model_dump_json().encode()
    if limits is not None and len(body) + _PROGRAM_BYTES > limits.request_bytes:
        raise ValueError(
            f"the tests take {len(body) >> 20} MiB, and the sandbox reads requests of "
            f"{limits.request_bytes >> 20} MiB (its limit request_bytes)"
        )
    if len(body) > CHECKED_BYTES:
        require_few_values(body)


def require_few_values(text: bytes) -> None:
    """Raise ``ValueError`` for JSON with so many values that parsing takes seconds."""
    values, at, quoted = 0, 0, False
    while at < len(text):
        end = at + CHECKED_BYTES
        while text[end - 1 : end] == b"\\":
            end += 1  # not between a backslash and what it escapes
        plain = text[at:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        for part in plain.split(b'"'):
            values += 0 if quoted else part.count(b",") + part.count(b":")
            quoted = not quoted
        quoted = not quoted
        at = end
        if values > JSON_VALUES:
            raise ValueError(f"the request contains more than {JSON_VALUES} JSON values")


def _require_languages(problem: GradedProblem, language: Language) -> None:
    if isinstance(problem, FunctionProblem):
        if language is not PYTHON:
            raise ValueError(
                f"tests of Python functions need language python, got {language.name!r}"
            )
        return
    if isinstance(problem, ScoredProblem) and problem.sources and not language.compiled:
        raise ValueError(f"provided_data.grader_files need language cpp, got {language.name!r}")
    if problem.checker is not None:
        try:
            language_named(problem.checker.language)
        except ValueError as error:
            raise ValueError(f"provided_data.checker: {error}") from error


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
            cases=problem.cases[:most],
        )
    raise ValueError("extra.max_cases does not fit a problem with subtasks")
