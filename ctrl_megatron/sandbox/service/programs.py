"""Running programs of any supported language on the pool of workers: requests as jobs, a job's
report as the contract's answer, C++ compiled once.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import shutil
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctrl_megatron.sandbox import wire
from ctrl_megatron.sandbox.jail import files
from ctrl_megatron.sandbox.jail.program import PATH
from ctrl_megatron.sandbox.jail.supervisor import Job, JobReport
from ctrl_megatron.sandbox.languages import Language, language_named, require_isolation
from ctrl_megatron.sandbox.limits import (
    COMPILATIONS_BYTES,
    COMPILER_MEMORY_MB,
    COMPILER_MESSAGE_CHARACTERS,
    FETCHED_BYTES,
    SHELL_MEMORY_MB,
    SandboxLimits,
)
from ctrl_megatron.sandbox.service.problem_clock import ProblemClock
from ctrl_megatron.sandbox.service.workers import WorkerPool

CPP_STANDARDS = ("c++11", "c++14", "c++17", "c++20")
DEFAULT_CPP_STANDARD = "c++17"
STOP_REASONS = {
    "timeout": "time limit exceeded",
    "job_timeout": "the problem's time is over",
    "output": "output limit exceeded",
    "disk": "disk limit exceeded",
    "fetch": f"the files to fetch take more than {FETCHED_BYTES >> 20} MiB",
    "broke": "the program brought down every worker that ran it",
}
"""What a job's ``stopped`` means."""
_CPP_FLAGS = ("-O2", "-w", "-pthread")
_BINARY = "main"
_RECORD_BYTES = 2048
"""Of a kept compilation beside its texts."""
_KILLED = -9


@dataclass(frozen=True, slots=True)
class Compilation:
    """What the compiler said, and the binary (base64) if it made one."""

    result: wire.CommandRunResult
    binary: str | None

    @property
    def size(self) -> int:
        """Bytes that keeping it takes, about."""
        texts = (self.binary, self.result.stdout, self.result.stderr)
        return sum(len(text or "") for text in texts) + _RECORD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that is ready to run any number of times, or that did not compile."""

    language: Language
    code: str
    prelude: str = ""
    """Python only: runs before the program in its module."""
    compilation: Compilation | None = None
    """Of a compiled language."""

    @property
    def not_compiled(self) -> ProgramRun | None:
        """What every run of a program that did not compile is; None for one that can run."""
        if self.compilation is None or self.compilation.binary is not None:
            return None
        failed = wire.RunCodeResponse(
            status=wire.RunStatus.FAILED, compile_result=self.compilation.result
        )
        return ProgramRun(failed, True)


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """One run: the contract's answer, and whether all of the output was kept."""

    response: wire.RunCodeResponse
    whole: bool

    @property
    def stdout(self) -> str:
        """What the program wrote."""
        run = self.response.run_result
        return (run.stdout if run else None) or ""

    @property
    def timed_out(self) -> bool:
        """Whether it, or the compiler, used up its time."""
        return self.response.timed_out

    @property
    def failure(self) -> str:
        """Why the run itself failed, empty when it ended with status 0 and all its output."""
        run, compiled = self.response.run_result, self.response.compile_result
        if run is None:
            timed_out = compiled and compiled.status is wire.CommandRunStatus.TIME_LIMIT_EXCEEDED
            text = "time limit exceeded" if timed_out else _first_error(compiled)
            return f"compilation failed: {text}"[:1000]
        if run.return_code is None:
            return "time limit exceeded"
        if not self.whole:
            return "output limit exceeded"
        if run.return_code != 0:
            last = (run.stderr or "").strip().rpartition("\n")[2]
            return f"exit status {run.return_code}: {last}"[:1000]
        return ""


class ProgramRunner:
    """Runs programs on ``pool``; keeps compiled ones."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.limits = pool.settings.limits
        self.compiler = Compiler(pool.run)

    async def prepare(
        self,
        language: Language,
        code: str,
        *,
        compile_seconds: float | None = None,
        standard: str = DEFAULT_CPP_STANDARD,
        with_sources: Mapping[str, str] | None = None,
        prelude: str = "",
    ) -> Program:
        """Compile ``code`` where the language asks for it, with further source files.

        Raises ``ValueError`` where the language cannot be run.
        """
        require_isolation(language, str(self.pool.isolation.get("tier")))
        if not language.compiled:
            return Program(language=language, code=code, prelude=prelude)
        compilation = await self.compiler.compile(
            self.limits,
            {**(with_sources or {}), language.source: code},
            standard=standard,
            seconds=compile_seconds,
        )
        return Program(language=language, code=code, compilation=compilation)

    async def run(
        self,
        program: Program,
        *,
        stdin: str = "",
        seconds: float | None = None,
        memory_mb: int = -1,
        contents: Mapping[str, str | None] | None = None,
        fetch: Sequence[str] = (),
        arguments: Sequence[str] = (),
        expected: str = "",
        clock: ProblemClock | None = None,
    ) -> ProgramRun:
        """Run once, while the problem's ``clock`` is not over. ``contents``: path -> base64.
        ``expected``: an output that must be kept whole, however long. Raises ``ValueError`` for
        what is not granted.
        """
        if program.not_compiled is not None:
            return program.not_compiled
        language, compilation = program.language, program.compilation
        contents = dict(contents or {})
        if compilation is not None:
            contents["main"] = compilation.binary
        elif language.profile is not None:
            contents[language.source] = to_base64(program.code)
        job = _program_job(
            self.limits,
            program.code,
            stdin=stdin,
            seconds=seconds,
            memory_mb=memory_mb,
            contents=contents,
            fetch=fetch,
        )
        if language.profile == "shell":
            # Each of its processes may take this much.
            job["memory_mb"] = min(job["memory_mb"], SHELL_MEMORY_MB)
        if language.profile is not None:
            command = [*language.command, *arguments]
            job |= {"native": {"profile": language.profile, "command": command}, "code": ""}
        elif arguments:
            argv = f"\n__import__('sys').argv.extend({list(arguments)!r})\n"
            job["prelude"] = program.prelude + argv
        else:
            job["prelude"] = program.prelude
        # No character takes more than four bytes.
        job["output_bytes"] = max(self.limits.output_bytes, 4 * len(expected))
        report = await self.pool.run(job, job["seconds"], clock)
        response = _job_response(report, fetch)
        if compilation is not None:
            response.compile_result = compilation.result
        return ProgramRun(response, not report["stdout"]["truncated"])

    async def run_code(self, request: wire.RunCodeRequest) -> wire.RunCodeResponse:
        """The answer to a ``/run_code`` request. Raises ``ValueError`` for what cannot be run."""
        program = await self.prepare(
            language_named(request.language), request.code, compile_seconds=request.compile_timeout
        )
        run = await self.run(
            program,
            stdin=request.stdin or "",
            seconds=request.run_timeout,
            memory_mb=request.memory_limit_MB,
            contents=request.files,
            fetch=request.fetch_files,
        )
        return run.response


class Compiler:
    """C++ to a binary: g++ inside the jail. Compiles each program once: equal sources, flags and
    compiler give the same binary.

    ``run_job`` runs one job on a worker. At most ``COMPILATIONS_BYTES`` are kept, failures
    included, the least recently used goes first; one that ran out of time is not kept.
    """

    def __init__(self, run_job: Callable[[Job, float], Awaitable[JobReport]]) -> None:
        self._run_job = run_job
        self._kept: OrderedDict[str, Compilation] = OrderedDict()
        self._bytes = 0
        self._under_way: dict[str, asyncio.Task[Compilation]] = {}

    async def compile(
        self,
        limits: SandboxLimits,
        sources: Mapping[str, str],
        *,
        standard: str = DEFAULT_CPP_STANDARD,
        seconds: float | None,
    ) -> Compilation:
        """Compile ``sources`` (file name -> text), all ``.cpp`` files together.

        Raises ``ValueError`` where there is no g++ or for an unknown standard, ``WorkerFault`` and
        ``QueueFull`` like any job.
        """
        compiler = shutil.which("g++", path=PATH)
        if compiler is None:
            raise ValueError(
                f"language 'cpp' needs g++, which this machine does not have on {PATH}; install "
                "it, or point sandbox.endpoint at a service that has it"
            )
        if standard not in CPP_STANDARDS:
            raise ValueError(f"unknown C++ standard {standard!r}; use {', '.join(CPP_STANDARDS)}")
        units = sorted(name for name in sources if name.endswith((".cpp", ".cc", ".cxx")))
        job = _program_job(
            limits,
            "",
            stdin="",
            seconds=seconds,
            memory_mb=min(COMPILER_MEMORY_MB, limits.max_memory_mb),
            contents={name: to_base64(text) for name, text in sources.items()},
            fetch=[_BINARY],
        )
        command = ["g++", f"-std={standard}", *_CPP_FLAGS, "-o", _BINARY, *units]
        job["native"] = {"profile": "compiler", "command": command}
        # The time as well: one that waits for a compilation must not get another's shorter limit.
        parts = json.dumps([compiler, command, job["seconds"], sorted(job["files"].items())])
        key = hashlib.sha256(parts.encode()).hexdigest()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if key not in self._under_way:
            task = asyncio.create_task(self._compile(key, job))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key))
        # One caller that gives up must not end the work of the others.
        return await asyncio.shield(self._under_way[key])

    async def _compile(self, key: str, job: Job) -> Compilation:
        response = _job_response(await self._run_job(job, job["seconds"]), [_BINARY])
        assert response.run_result is not None
        binary = response.files.get(_BINARY) if response.run_result.return_code == 0 else None
        most = COMPILER_MESSAGE_CHARACTERS
        said = {name: getattr(response.run_result, name)[:most] for name in ("stdout", "stderr")}
        compilation = Compilation(response.run_result.model_copy(update=said), binary)
        if response.run_result.status is wire.CommandRunStatus.FINISHED:
            self._kept[key] = compilation
            self._bytes += compilation.size
            while self._bytes > COMPILATIONS_BYTES and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= dropped.size
        return compilation


def seconds_within(limits: SandboxLimits, wanted: float | None) -> float:
    """The wall clock of one test. Raises ``ValueError`` for one beyond the limit."""
    if wanted is None:
        return limits.test_seconds
    if not math.isfinite(wanted) or not 0 < wanted <= limits.max_test_seconds:
        raise ValueError(
            f"run_timeout must be in (0, {limits.max_test_seconds:g}] seconds, got {wanted:g}"
        )
    return float(wanted)


def problem_seconds_within(limits: SandboxLimits, wanted: Any, test_seconds: float) -> float:
    """The time of a whole problem, of which one test may take ``test_seconds``. Raises
    ``ValueError`` for one beyond the limit.
    """
    if wanted is None:
        return max(limits.problem_seconds, test_seconds)
    number = isinstance(wanted, (int, float)) and not isinstance(wanted, bool)
    if not number or not 0 < wanted <= limits.max_problem_seconds:
        most = f"{limits.max_problem_seconds:g}"
        raise ValueError(f"extra.problem_seconds must be in (0, {most}], got {wanted!r}"[:200])
    return float(wanted)


def to_base64(text: str) -> str:
    """``text`` as the content of a file in a job."""
    return base64.b64encode(text.encode(errors="surrogatepass")).decode()


def _program_job(
    limits: SandboxLimits,
    code: str,
    *,
    stdin: str,
    seconds: float | None,
    memory_mb: int,
    contents: Mapping[str, str | None],
    fetch: Sequence[str],
) -> Job:
    """A whole program with its stdin. Raises ``ValueError`` for what cannot be granted."""
    if memory_mb > limits.max_memory_mb:
        raise ValueError(f"memory_limit_MB may be at most {limits.max_memory_mb}, got {memory_mb}")
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
        "seconds": seconds_within(limits, seconds),
        "memory_mb": memory_mb if memory_mb > 0 else limits.memory_mb,
        "files": dict(zip(files.check(given), given.values(), strict=True)),
        "fetch": files.check(fetch),
    }


def _job_response(report: JobReport, fetched: Sequence[str]) -> wire.RunCodeResponse:
    """A program job's report by the contract's status rule; ``fetched`` paths as asked for."""
    stopped, status = report["stopped"], report["exit"]
    timed_out = stopped in ("timeout", "job_timeout")
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
        contents={p: content[files.inside(p)] for p in fetched if files.inside(p) in content},
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
    """One run by the contract's status rule: status 0 within the time is a success, and what ran
    out of time has no status.
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


def _first_error(compiled: wire.CommandRunResult | None) -> str:
    lines = ((compiled and compiled.stderr) or "").splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")
