"""Judging submissions: which data set kinds exist and how each turns a completion into verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ctrl_megatron.sandbox import lax
from ctrl_megatron.sandbox.datasets.functions import read_human_eval, read_mbpp
from ctrl_megatron.sandbox.datasets.ioi import read_ioi
from ctrl_megatron.sandbox.datasets.live_code_bench import read_live_code_bench
from ctrl_megatron.sandbox.datasets.problems import (
    FunctionProblem,
    Problem,
    ScoredProblem,
    StdioProblem,
)
from ctrl_megatron.sandbox.datasets.stdio_cases import (
    read_code_contests,
    read_common_oj,
    read_input_output,
)
from ctrl_megatron.sandbox.execution import Executor, Program
from ctrl_megatron.sandbox.extraction import Extracted, extract_code
from ctrl_megatron.sandbox.judging import (
    Judged,
    Terms,
    judge_functions,
    judge_outputs,
    judge_scored,
)
from ctrl_megatron.sandbox.languages.compiler import DEFAULT_STANDARD
from ctrl_megatron.sandbox.languages.registry import PYTHON, Language, language_named
from ctrl_megatron.sandbox.wire import EvalResult, SubmitRequest

READERS: dict[str, Callable[[Mapping[str, Any]], Problem]] = {
    "APPSDataset": read_input_output,
    "CodeContestsDataset": read_code_contests,
    "CommonOJDataset": read_common_oj,
    "HumanEvalDataset": read_human_eval,
    "IOIDataset": read_ioi,
    "LiveCodeBenchDataset": read_live_code_bench,
    "MBPPDataset": read_mbpp,
    "TACODataset": read_input_output,
}
_LANGUAGE_REQUIRED = ("CommonOJDataset",)


def list_datasets() -> list[str]:
    """The data set kinds that ``judge`` knows, in alphabetical order."""
    return sorted(READERS)


async def judge(executor: Executor, request: SubmitRequest) -> EvalResult:
    """Judge one submission. Raises ``ValueError`` for a bad request, ``WorkerFault`` and
    ``QueueFull`` for ours.
    """
    config = request.config
    if config.custom_extract_logic:
        raise ValueError(
            "custom_extract_logic is refused: it would run your code inside the service"
        )
    kind = config.dataset_type or request.dataset
    if kind not in READERS:
        known = ", ".join(list_datasets())
        raise ValueError(f"dataset_type {kind!r} is not supported; supported: {known}")
    data = config.provided_data
    if not isinstance(data, dict):
        raise ValueError("provided_data must be an object; this service keeps no data sets")
    language = _language(request, kind)
    # Reading may unpack megabytes: other requests go on meanwhile.
    problem = await asyncio.to_thread(READERS[kind], data)
    problem = _first_cases(problem, config.extra.get("max_cases"))
    found = extract_code(request.completion, language)
    terms = Terms(
        seconds=config.run_timeout, run_all=bool(config.extra.get("run_all_cases", False))
    )
    return await _judge(executor, request, problem, language, found, terms)


async def _judge(
    executor: Executor,
    request: SubmitRequest,
    problem: Problem,
    language: Language,
    found: Extracted,
    terms: Terms,
) -> EvalResult:
    mode = request.config.extra.get("lax", False)
    if mode not in (True, False, None, "compare"):
        raise ValueError(f"extra.lax must be true, false or 'compare', got {mode!r}"[:200])
    laxly = None
    if mode and not isinstance(problem, ScoredProblem) and lax.differs(problem):
        if language is not PYTHON:
            raise ValueError(f"extra.lax is for python, got language {language.name!r}")
        laxly = await lax.judge_laxly(executor, problem, found.code, terms)
    if mode is True and laxly is not None:
        return _result(request, problem, found, laxly, {"lax": True})
    judged = await _strictly(executor, request, problem, language, found, terms)
    extra = {}
    if mode == "compare":
        agreed = judged.passed if laxly is None else laxly.passed
        extra = {"lax_accepted": agreed, "forged": agreed and not judged.passed}
    return _result(request, problem, found, judged, extra)


async def _strictly(
    executor: Executor,
    request: SubmitRequest,
    problem: Problem,
    language: Language,
    found: Extracted,
    terms: Terms,
) -> Judged:
    if isinstance(problem, FunctionProblem):
        if language is not PYTHON:
            raise ValueError(
                f"tests of Python functions need language python, got {language.name!r}"
            )
        judged = await judge_functions(executor, problem, found.code, terms)
    else:
        program = await _program(executor, request, problem, language, found.code)
        if isinstance(problem, ScoredProblem):
            return await judge_scored(executor, problem, program, terms)
        judged = await judge_outputs(executor, problem, program, terms)
    return judged.as_one() if problem.single else judged


async def _program(
    executor: Executor,
    request: SubmitRequest,
    problem: StdioProblem | ScoredProblem,
    language: Language,
    code: str,
) -> Program:
    sources = problem.sources if isinstance(problem, ScoredProblem) else {}
    if sources and not language.compiled:
        raise ValueError(f"provided_data.grader_files need language cpp, got {language.name!r}")
    prelude = problem.prelude if isinstance(problem, StdioProblem) else ""
    return await executor.prepare(
        language,
        code,
        compile_seconds=request.config.compile_timeout,
        standard=str(request.config.extra.get("cpp_standard", DEFAULT_STANDARD)),
        with_sources=sources,
        prelude=prelude if language is PYTHON else "",
    )


def _language(request: SubmitRequest, kind: str) -> Language:
    name = request.config.language
    if name is None and kind not in _LANGUAGE_REQUIRED:
        return PYTHON
    return language_named(name)


def _first_cases(problem: Problem, most: Any) -> Problem:
    if most is None:
        return problem
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ValueError(f"extra.max_cases must be a positive integer, got {most!r}"[:200])
    if isinstance(problem, StdioProblem):
        return replace(problem, cases=problem.cases[:most])
    if isinstance(problem, FunctionProblem):
        tests = replace(problem.tests, tests=problem.tests.tests[:most])
        return replace(problem, tests=tests, cases=problem.cases[:most])
    raise ValueError("extra.max_cases does not fit a problem with subtasks")


def _result(
    request: SubmitRequest,
    problem: Problem,
    found: Extracted,
    judged: Judged,
    extra: Mapping[str, Any],
) -> EvalResult:
    functions = isinstance(problem, FunctionProblem)
    return EvalResult(
        id=request.id,
        accepted=judged.passed,
        extracted_code=found.code,
        full_code=found.code + problem.adapter if functions else found.code,
        test_code="\n".join(problem.tests.tests) if functions else None,
        tests=list(judged.cases),
        extracted_type=found.kind,
        extra={**(judged.extra or {}), **extra} or None,
    )
