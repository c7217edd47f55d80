"""Requests as jobs for a worker, and a worker's report as the contract's records."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

from ctrl_megatron.sandbox.function_tests import FunctionTests
from ctrl_megatron.sandbox.jail import files
from ctrl_megatron.sandbox.jail.verdict import Verdict
from ctrl_megatron.sandbox.limits import SandboxLimits
from ctrl_megatron.sandbox.wire import (
    CommandRunResult,
    CommandRunStatus,
    EvalTestCase,
    RunCodeRequest,
    RunCodeResponse,
    RunStatus,
)

Job = dict[str, Any]
_SHOWN = 1000
_KILLED = -9
_FLOODED = "output limit exceeded"
_BROKEN_OFF = {
    "timeout": "time limit exceeded",
    "job_timeout": "time limit of the whole problem exceeded",
    "output": _FLOODED,
    "disk": "disk limit exceeded",
}


def seconds_within(limits: SandboxLimits, wanted: float | None) -> float:
    """The wall clock of one test. Raises ``ValueError`` for one that is not positive or beyond the
    limit.
    """
    if wanted is None:
        return limits.test_seconds
    if not math.isfinite(wanted) or not 0 < wanted <= limits.max_test_seconds:
        raise ValueError(
            f"run_timeout must be in (0, {limits.max_test_seconds:g}] seconds, got {wanted:g}"
        )
    return float(wanted)


def program_job(
    limits: SandboxLimits,
    code: str,
    *,
    stdin: str,
    seconds: float | None,
    memory_mb: int = -1,
    contents: Mapping[str, str | None] | None = None,
    fetch: list[str] | None = None,
) -> Job:
    """A whole program with its stdin. Raises ``ValueError`` for limits or files that cannot be
    granted.
    """
    return {
        "kind": "program",
        "code": code,
        "prelude": "",
        "stdin": base64.b64encode(stdin.encode(errors="surrogatepass")).decode(),
        "seconds": seconds_within(limits, seconds),
        "memory_mb": _memory_within(limits, memory_mb),
        "files": {
            files.inside(path): _base64(path, text)
            for path, text in (contents or {}).items()
            if text is not None
        },
        "fetch": [files.inside(path) for path in fetch or ()],
    }


def request_job(limits: SandboxLimits, request: RunCodeRequest) -> Job:
    """The job of a ``/run_code`` request. Raises ``ValueError``."""
    return program_job(
        limits,
        request.code,
        stdin=request.stdin or "",
        seconds=request.run_timeout,
        memory_mb=request.memory_limit_MB,
        contents=request.files,
        fetch=request.fetch_files,
    )


def asserts_job(
    limits: SandboxLimits, code: str, tests: FunctionTests, *, seconds: float | None, run_all: bool
) -> Job:
    """A program whose functions are judged by asserts. Raises ``ValueError``."""
    return {
        "kind": "asserts",
        "code": code,
        "prelude": tests.prelude,
        "setup": tests.setup,
        "tests": tests.tests,
        "stubs": tests.stubs,
        "seconds": seconds_within(limits, seconds),
        "memory_mb": limits.memory_mb,
        "run_all": run_all,
    }


def run_response(end: Mapping[str, Any], fetched: list[str]) -> RunCodeResponse:
    """What a program job reported, by the contract's status rule; ``fetched`` are the paths as
    asked for.
    """
    stopped = end["stopped"]
    timed_out = stopped in ("timeout", "job_timeout")
    stderr = _text(end["stderr"])
    if stopped in ("output", "disk"):
        stderr = f"{stderr}\n{_BROKEN_OFF[stopped]}"
    code = _return_code(end["exit"]) if stopped is None else _KILLED
    result = CommandRunResult(
        status=CommandRunStatus.TIME_LIMIT_EXCEEDED if timed_out else CommandRunStatus.FINISHED,
        execution_time=end["wall"],
        return_code=None if timed_out else code,
        stdout=_text(end["stdout"]),
        stderr=stderr,
    )
    success = not timed_out and code == 0
    return RunCodeResponse(
        status=RunStatus.SUCCESS if success else RunStatus.FAILED,
        run_result=result,
        files={
            p: end["files"][files.inside(p)] for p in fetched if files.inside(p) in end["files"]
        },
    )


def stdout_is_whole(end: Mapping[str, Any]) -> bool:
    """Whether all of the program's output was kept."""
    return not end["stdout"]["truncated"]


def assert_cases(
    tests: FunctionTests, verdicts: tuple[Verdict, ...], stopped: str | None, run_all: bool
) -> list[EvalTestCase]:
    """One case per assert; without ``run_all`` the list ends at the first failure.

    Verdicts that never came, because the job was cut short, are failures: nothing missing passes.
    """
    cases = [_assert_case(tests.tests[v.index], v) for v in verdicts]
    ended = bool(cases) and not cases[-1].passed and not run_all
    reason = _BROKEN_OFF.get(stopped or "", "not run")
    while len(cases) < len(tests.tests) and not ended:
        timed_out = "timeout" in (stopped or "")
        verdict = Verdict(len(cases), "timeout" if timed_out else "failed", reason, None)
        cases.append(_assert_case(tests.tests[len(cases)], verdict))
        stopped, reason = None, f"not run: {reason}"[:200]
        ended = not run_all
    return cases


def _assert_case(test: str, verdict: Verdict) -> EvalTestCase:
    passed, timed_out = verdict.passed, verdict.status == "timeout"
    result = CommandRunResult(
        status=CommandRunStatus.TIME_LIMIT_EXCEEDED if timed_out else CommandRunStatus.FINISHED,
        execution_time=verdict.seconds,
        return_code=None if timed_out else int(not passed),
        stdout="",
        stderr=verdict.reason,
    )
    status = RunStatus.SUCCESS if passed else RunStatus.FAILED
    info = {"test": test[:_SHOWN], "reason": verdict.reason}
    return EvalTestCase(
        passed=passed, exec_info=RunCodeResponse(status=status, run_result=result), test_info=info
    )


def _memory_within(limits: SandboxLimits, wanted: int) -> int:
    if wanted <= 0:
        return limits.memory_mb
    if wanted > limits.max_memory_mb:
        raise ValueError(f"memory_limit_MB may be at most {limits.max_memory_mb}, got {wanted}")
    return wanted


def _base64(path: str, text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"file {path!r} is not base64: {error}") from error
    return text


def _text(output: Mapping[str, Any]) -> str:
    return base64.b64decode(output["bytes"]).decode(errors="replace")


def _return_code(status: int) -> int:
    signal = status & 0x7F
    return -signal if signal else status >> 8
