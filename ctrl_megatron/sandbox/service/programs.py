"""Runs programs of every supported language on the pool of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctrl_megatron.sandbox import wire
from ctrl_megatron.sandbox.languages import Language, language_named, require_isolation
from ctrl_megatron.sandbox.limits import SHELL_MEMORY_MB
from ctrl_megatron.sandbox.service.compiler import DEFAULT_CPP_STANDARD, Compilation, Compiler
from ctrl_megatron.sandbox.service.jobs import STOP_REASONS, job_response, program_job, to_base64
from ctrl_megatron.sandbox.service.problem_clock import ProblemClock
from ctrl_megatron.sandbox.service.workers import WorkerPool

_OUT_OF_MEMORY = ("MemoryError", "std::bad_alloc")
"""Errors of Python and C++ for a program that gets no more memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that is ready to run any number of times, or whose compilation failed."""

    language: Language
    code: str
    prelude: str = ""
    """Python code that runs before the program in the same module."""
    compilation: Compilation | None = None
    """Set for programs of a compiled language."""

    @property
    def failed_compilation_run(self) -> ProgramRun | None:
        """The result of every run of a program that did not compile; None for one that can run."""
        if self.compilation is None or self.compilation.binary is not None:
            return None
        failed = wire.RunCodeResponse(
            status=wire.RunStatus.FAILED, compile_result=self.compilation.result
        )
        return ProgramRun(failed, True)


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """One run: the contract's answer, whether the whole output was kept, and which limit ended it,
    a key of ``STOP_REASONS``.
    """

    response: wire.RunCodeResponse
    whole: bool
    stopped: str | None = None

    @property
    def stdout(self) -> str:
        run = self.response.run_result
        return (run.stdout if run else None) or ""

    @property
    def timed_out(self) -> bool:
        return self.response.timed_out

    @property
    def failure(self) -> str:
        """Why the run failed; empty if it ended with status 0 and its whole output was kept."""
        run, compiled = self.response.run_result, self.response.compile_result
        if run is None:
            timed_out = compiled and compiled.status is wire.CommandRunStatus.TIME_LIMIT_EXCEEDED
            text = "time limit exceeded" if timed_out else _first_error(compiled)
            return f"compilation failed: {text}"[:1000]
        if run.return_code is None:
            return STOP_REASONS[self.stopped or "timeout"]
        if not self.whole:
            return "output limit exceeded"
        if run.return_code != 0:
            last = (run.stderr or "").strip().rpartition("\n")[2]
            memory = any(word in last for word in _OUT_OF_MEMORY)
            limit = " (memory limit exceeded)" if memory else ""
            return f"exit status {run.return_code}: {last[:900]}{limit}"
        return ""


class ProgramRunner:
    """Runs programs on ``pool`` and keeps compiled ones."""

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
        """Compile ``code``, with further source files, if the language is compiled.

        Raises ``ValueError`` if the language cannot be run.
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
        """Run the program once, unless the time of the problem's ``clock`` is over. ``contents``
        maps paths to base64. ``expected`` is the expected output: an output of that length must be
        kept whole. Raises ``ValueError`` for a request beyond the limits.
        """
        if program.failed_compilation_run is not None:
            return program.failed_compilation_run
        language, compilation = program.language, program.compilation
        contents = dict(contents or {})
        if compilation is not None:
            contents["main"] = compilation.binary
        elif language.profile is not None:
            contents[language.source] = to_base64(program.code)
        job = program_job(
            self.limits,
            program.code,
            stdin=stdin,
            seconds=seconds,
            memory_mb=memory_mb,
            contents=contents,
            fetch=fetch,
        )
        if language.profile == "shell":
            # The limit applies to each of its processes.
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
        response = job_response(report, fetch)
        if compilation is not None:
            response.compile_result = compilation.result
        return ProgramRun(response, not report["stdout"]["truncated"], report["stopped"])

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


def _first_error(compiled: wire.CommandRunResult | None) -> str:
    lines = ((compiled and compiled.stderr) or "").splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")
