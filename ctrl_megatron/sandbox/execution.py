"""Running programs of any supported language on the pool of workers."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctrl_megatron.sandbox import jobs
from ctrl_megatron.sandbox.languages.compiler import DEFAULT_STANDARD, Compiler
from ctrl_megatron.sandbox.languages.registry import Language, language_named, require_isolation
from ctrl_megatron.sandbox.limits import SandboxLimits
from ctrl_megatron.sandbox.wire import (
    CommandRunResult,
    CommandRunStatus,
    RunCodeRequest,
    RunCodeResponse,
    RunStatus,
)
from ctrl_megatron.sandbox.workers import JobResult, Pool

_SHELL_MEMORY_MB = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that is ready to run any number of times, or that did not compile."""

    language: Language
    code: str
    prelude: str = ""
    """Python only: runs before the program in its module."""
    binary: str | None = None
    """base64, of a compiled language."""
    compile_result: CommandRunResult | None = None

    @property
    def broken(self) -> RunCodeResponse | None:
        """The answer of every run of a program that did not compile; None for one that did."""
        if not self.language.compiled or self.binary is not None:
            return None
        return RunCodeResponse(status=RunStatus.FAILED, compile_result=self.compile_result)


@dataclass(frozen=True, slots=True)
class Ran:
    """One run: the contract's answer, and whether all of the output was kept."""

    response: RunCodeResponse
    whole: bool

    @property
    def stdout(self) -> str:
        """What the program wrote."""
        run = self.response.run_result
        return (run.stdout if run else None) or ""

    @property
    def failure(self) -> str:
        """Why the run itself failed, empty when it ended with status 0 and all its output."""
        run, compiled = self.response.run_result, self.response.compile_result
        if run is None:
            timed_out = compiled and compiled.status is CommandRunStatus.TIME_LIMIT_EXCEEDED
            said = "time limit exceeded" if timed_out else _first_error(compiled)
            return f"compilation failed: {said}"[:1000]
        if run.return_code is None:
            return "time limit exceeded"
        if not self.whole:
            return "output limit exceeded"
        if run.return_code != 0:
            last = (run.stderr or "").strip().rpartition("\n")[2]
            return f"exit status {run.return_code}: {last}"[:1000]
        return ""


class Executor:
    """Runs programs on ``pool``; keeps compiled ones."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.compiler = Compiler(self.run_job)

    @property
    def limits(self) -> SandboxLimits:
        """Limits of each job."""
        return self.pool.settings.limits

    async def run_job(self, job: jobs.Job, seconds: float) -> JobResult:
        """One job on a worker. Raises ``WorkerFault`` or ``QueueFull``."""
        return await self.pool.run(job, seconds=seconds)

    async def prepare(
        self,
        language: Language,
        code: str,
        *,
        compile_seconds: float | None = None,
        standard: str = DEFAULT_STANDARD,
        with_sources: Mapping[str, str] | None = None,
        prelude: str = "",
    ) -> Program:
        """Compile ``code`` where the language asks for it, with further source files.

        Raises ``ValueError`` where the language cannot be run.
        """
        require_isolation(language, str(self.pool.isolation.get("tier")))
        if not language.compiled:
            return Program(language=language, code=code, prelude=prelude)
        done = await self.compiler.compile(
            self.limits,
            {**(with_sources or {}), language.source: code},
            standard=standard,
            seconds=compile_seconds,
        )
        return Program(language=language, code=code, binary=done.binary, compile_result=done.result)

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
    ) -> Ran:
        """Run once. ``contents`` maps paths to base64. Raises ``ValueError`` for limits or files
        that cannot be granted.
        """
        if program.broken is not None:
            return Ran(program.broken, True)
        job = jobs.program_job(
            self.limits,
            program.code,
            stdin=stdin,
            seconds=seconds,
            memory_mb=memory_mb,
            contents={**(contents or {}), **_own_files(program)},
            fetch=list(fetch),
        )
        language = program.language
        if language.profile == "shell":
            # Each of its processes may take this much.
            job["memory_mb"] = min(job["memory_mb"], _SHELL_MEMORY_MB)
        if language.profile is None:
            job["prelude"] = program.prelude + _argv(arguments)
        else:
            command = [*language.command, *arguments]
            job |= {"native": {"profile": language.profile, "command": command}, "code": ""}
        done = await self.run_job(job, job["seconds"])
        response = jobs.run_response(done.end, list(fetch))
        response = response.model_copy(update={"compile_result": program.compile_result})
        return Ran(response, jobs.stdout_is_whole(done.end))

    async def answer(self, request: RunCodeRequest) -> RunCodeResponse:
        """The answer to a ``/run_code`` request. Raises ``ValueError`` for what cannot be run."""
        program = await self.prepare(
            language_named(request.language),
            request.code,
            compile_seconds=request.compile_timeout,
        )
        ran = await self.run(
            program,
            stdin=request.stdin or "",
            seconds=request.run_timeout,
            memory_mb=request.memory_limit_MB,
            contents=request.files,
            fetch=request.fetch_files,
        )
        return ran.response


def as_file(text: str) -> str:
    """``text`` as the content of a file in a job."""
    return base64.b64encode(text.encode(errors="surrogatepass")).decode()


def _own_files(program: Program) -> dict[str, str]:
    if program.binary is not None:
        return {"main": program.binary}
    if program.language.profile is not None:
        return {program.language.source: as_file(program.code)}
    return {}


def _argv(arguments: Sequence[str]) -> str:
    return f"\n__import__('sys').argv.extend({list(arguments)!r})\n" if arguments else ""


def _first_error(compiled: CommandRunResult | None) -> str:
    lines = ((compiled and compiled.stderr) or "").splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")
