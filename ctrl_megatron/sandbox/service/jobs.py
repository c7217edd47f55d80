"""Requests as jobs of a worker, and a worker's reports as the contract's answers."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

from ctrl_megatron.sandbox import wire
from ctrl_megatron.sandbox.jail import files
from ctrl_megatron.sandbox.jail.job import Job, JobReport
from ctrl_megatron.sandbox.limits import CPU_TIME_OVER, FETCHED_BYTES, WALL_TIME_OVER, SandboxLimits

STOP_REASONS = {
    "cpu": CPU_TIME_OVER,
    "timeout": WALL_TIME_OVER,
    "job_timeout": "the problem's time is over",
    "output": "output limit exceeded",
    "disk": "disk limit exceeded",
    "fetch": f"the files to fetch take more than {FETCHED_BYTES >> 20} MiB",
    "broke": "the program brought down every worker that ran it",
}
"""Texts for the values of a report's ``stopped``."""
TIME_OVER = ("cpu", "timeout", "job_timeout")
"""Those of them that time decides."""
_KILLED = -9


def to_base64(text: str) -> str:
    return base64.b64encode(text.encode(errors="surrogatepass")).decode()


def program_job(
    limits: SandboxLimits,
    code: str,
    *,
    stdin: str,
    seconds: float | None,
    memory_mb: int,
    contents: Mapping[str, str | None],
    fetch: Sequence[str],
) -> Job:
    """A job that runs a program with its stdin. Raises ``ValueError`` for a request beyond the
    limits.
    """
    if memory_mb > limits.max_memory_mb:
        raise ValueError(f"memory_limit_MB may be at most {limits.max_memory_mb}, got {memory_mb}")
    own = limits.validated_test_seconds(seconds)
    given = {path: text for path, text in contents.items() if text is not None}
    total = 0
    for path, text in given.items():
        try:
            size = len(base64.b64decode(text, validate=True))
        except ValueError as error:
            raise ValueError(f"file {path!r} is not base64: {error}") from error
        if size > limits.file_bytes:
            raise ValueError(f"file {path!r} is larger than {limits.file_bytes} bytes")
        total += size
    if total > limits.disk_mb << 20:
        raise ValueError(f"the files take {total} bytes, a program has {limits.disk_mb} MiB")
    return {
        "kind": "program",
        "code": code,
        "prelude": "",
        "stdin": to_base64(stdin),
        "seconds": own,
        "wall_seconds": own * limits.wall_factor,
        "memory_mb": memory_mb if memory_mb > 0 else limits.memory_mb,
        "files": dict(zip(files.relative_paths(given), given.values(), strict=True)),
        "fetch": files.relative_paths(fetch),
    }


def job_response(report: JobReport, fetched: Sequence[str]) -> wire.RunCodeResponse:
    """Convert the report of a program's job by the contract's status rule; ``fetched`` are the
    paths as requested.
    """
    stopped, status = report["stopped"], report["exit"]
    timed_out = stopped in TIME_OVER
    stderr = _text(report["stderr"])
    if stopped in STOP_REASONS and not timed_out:
        stderr = f"{stderr}\n{STOP_REASONS[stopped]}"
    code = _KILLED
    if stopped is None:
        assert status is not None
        code = -(status & 0x7F) or status >> 8
    content = report["files"]
    return run_response(
        code=code,
        timed_out=timed_out,
        seconds=report["wall"],
        stdout=_text(report["stdout"]),
        stderr=stderr,
        contents={
            p: content[files.relative_private_path(p)]
            for p in fetched
            if files.relative_private_path(p) in content
        },
    )


def run_response(
    *,
    code: int,
    timed_out: bool,
    seconds: float | None,
    stdout: str = "",
    stderr: str,
    contents: Mapping[str, str] | None = None,
) -> wire.RunCodeResponse:
    """One run by the contract's status rule: exit status 0 within the time is a success, and a run
    that exceeded its time has no exit status.
    """
    statuses = wire.CommandRunStatus
    result = wire.CommandRunResult(
        status=statuses.TIME_LIMIT_EXCEEDED if timed_out else statuses.FINISHED,
        execution_time=seconds,
        return_code=None if timed_out else code,
        stdout=stdout,
        stderr=stderr,
    )
    success = code == 0 and not timed_out
    status = wire.RunStatus.SUCCESS if success else wire.RunStatus.FAILED
    return wire.RunCodeResponse(status=status, run_result=result, files=dict(contents or {}))


def _text(output: Mapping[str, str]) -> str:
    return base64.b64decode(output["bytes"]).decode(errors="replace")
