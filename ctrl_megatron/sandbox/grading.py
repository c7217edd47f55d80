"""Judging submissions: which data set kinds exist and how each turns a completion into verdicts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel, ValidationError

from ctrl_megatron.sandbox import jobs
from ctrl_megatron.sandbox.extraction import Extracted, extract_python
from ctrl_megatron.sandbox.function_tests import read_function_tests
from ctrl_megatron.sandbox.stdio import difference
from ctrl_megatron.sandbox.wire import EvalResult, EvalTestCase, RunStatus, SubmitRequest
from ctrl_megatron.sandbox.workers import Pool

Grader = Callable[[Pool, SubmitRequest, Extracted], Awaitable[EvalResult]]
_SHOWN = 1000


class _Input(BaseModel):
    stdin: str = ""


class _Output(BaseModel):
    stdout: str


class _StdioCase(BaseModel):
    input: _Input
    output: _Output


async def judge(pool: Pool, request: SubmitRequest) -> EvalResult:
    """Judge one submission. Raises ``ValueError`` for a bad request, ``WorkerFault`` and
    ``QueueFull`` for ours.
    """
    config = request.config
    if config.custom_extract_logic:
        raise ValueError(
            "custom_extract_logic is refused: it would run your code inside the service"
        )
    kind = config.dataset_type or request.dataset
    if kind not in GRADERS:
        known = ", ".join(sorted(GRADERS))
        raise ValueError(f"dataset_type {kind!r} is not supported yet; supported: {known}")
    if not isinstance(config.provided_data, dict):
        raise ValueError("provided_data must be an object; this service keeps no data sets")
    return await GRADERS[kind](pool, request, extract_python(request.completion))


async def judge_asserts(pool: Pool, request: SubmitRequest, found: Extracted) -> EvalResult:
    """Function problems: every assert runs in the judge, one case each."""
    limits, run_all = pool.settings.limits, _run_all(request)
    assert isinstance(request.config.provided_data, dict)
    tests = read_function_tests(request.config.provided_data)
    seconds = request.config.run_timeout
    job = jobs.asserts_job(limits, found.code, tests, seconds=seconds, run_all=run_all)
    result = await pool.run(job, seconds=max(limits.job_seconds, job["seconds"]))
    cases = jobs.assert_cases(tests, result.verdicts, result.end["stopped"], run_all)
    answer = _result(request, found, cases, len(tests.tests))
    return answer.model_copy(update={"test_code": "\n".join(tests.tests)})


async def judge_stdio(pool: Pool, request: SubmitRequest, found: Extracted) -> EvalResult:
    """stdin/stdout problems: one run per case; the expected output never leaves the service."""
    if request.config.language != "python":
        raise ValueError(f"language must be python, got {request.config.language!r}")
    assert isinstance(request.config.provided_data, dict)
    cases = _stdio_cases(request.config.provided_data)
    if _run_all(request):
        done = await asyncio.gather(*(_judge_case(pool, request, found, case) for case in cases))
        return _result(request, found, list(done), len(cases))
    judged: list[EvalTestCase] = []
    for case in cases:
        judged.append(await _judge_case(pool, request, found, case))
        if not judged[-1].passed:
            break
    return _result(request, found, judged, len(cases))


GRADERS: dict[str, Grader] = {
    "CommonOJDataset": judge_stdio,
    "MBPPDataset": judge_asserts,
    "HumanEvalDataset": judge_asserts,
}


def _run_all(request: SubmitRequest) -> bool:
    return bool(request.config.extra.get("run_all_cases", False))


def _stdio_cases(data: dict[str, Any]) -> list[_StdioCase]:
    tests = data.get("test")
    try:
        items = json.loads(tests) if isinstance(tests, str) else tests
        cases = [_StdioCase.model_validate(item) for item in items or ()]
    except (ValueError, TypeError, ValidationError) as error:
        raise ValueError(
            f"provided_data.test is not a list of stdin/stdout cases: {error}"
        ) from error
    if not cases:
        raise ValueError("provided_data.test is empty: nothing to judge")
    return cases


async def _judge_case(
    pool: Pool, request: SubmitRequest, found: Extracted, case: _StdioCase
) -> EvalTestCase:
    seconds = request.config.run_timeout
    job = jobs.program_job(
        pool.settings.limits, found.code, stdin=case.input.stdin, seconds=seconds
    )
    result = await pool.run(job, seconds=job["seconds"])
    response = jobs.run_response(result.end, [])
    stdout = (response.run_result.stdout if response.run_result else None) or ""
    if response.status is not RunStatus.SUCCESS:
        reason = _run_failure(response.run_result)
    elif not jobs.stdout_is_whole(result.end):
        reason = "output limit exceeded"
    else:
        reason = difference(stdout, case.output.stdout) or ""
    info = {
        "input": case.input.stdin[:_SHOWN],
        "expected": case.output.stdout[:_SHOWN],
        "output": stdout[:_SHOWN],
        "reason": reason,
    }
    return EvalTestCase(passed=not reason, exec_info=response, test_info=info)


def _run_failure(result: Any) -> str:
    if result.return_code is None:
        return "time limit exceeded"
    last = (result.stderr or "").strip().rpartition("\n")[2]
    return f"exit status {result.return_code}: {last}"[:_SHOWN]


def _result(
    request: SubmitRequest, found: Extracted, cases: list[EvalTestCase], total: int
) -> EvalResult:
    return EvalResult(
        id=request.id,
        accepted=len(cases) == total and all(case.passed for case in cases),
        extracted_code=found.code,
        full_code=found.code,
        tests=cases,
        extracted_type=found.kind,
    )
