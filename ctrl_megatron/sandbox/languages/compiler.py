"""C++ to a binary: g++ inside the jail, and a memory of what was compiled before."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import shutil
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ctrl_megatron.sandbox import jobs
from ctrl_megatron.sandbox.jail import native
from ctrl_megatron.sandbox.limits import SandboxLimits
from ctrl_megatron.sandbox.wire import CommandRunResult, CommandRunStatus
from ctrl_megatron.sandbox.workers import JobResult

STANDARDS = ("c++11", "c++14", "c++17", "c++20")
DEFAULT_STANDARD = "c++17"
_FLAGS = ("-O2", "-w", "-pthread")
_MEMORY_MB = 2048
_CACHE_BYTES = 256 << 20
_BINARY = "main"

RunJob = Callable[[jobs.Job, float], Awaitable[JobResult]]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler said, and the binary (base64) if it made one."""

    result: CommandRunResult
    binary: str | None


class Compiler:
    """Compiles each program once: equal sources, flags and compiler give the same binary.

    ``run`` runs one job on a worker. At most 256 MiB of binaries are kept, the least recently used
    goes first; a compilation that ran out of time is not kept.
    """

    def __init__(self, run: RunJob) -> None:
        self._run = run
        self._kept: OrderedDict[str, Compiled] = OrderedDict()
        self._bytes = 0
        self._under_way: dict[str, asyncio.Task[Compiled]] = {}
        self.hits = 0
        self.compilations = 0

    async def compile(
        self,
        limits: SandboxLimits,
        sources: Mapping[str, str],
        *,
        standard: str = DEFAULT_STANDARD,
        seconds: float | None,
    ) -> Compiled:
        """Compile ``sources`` (file name -> text), all ``.cpp`` files together.

        Raises ``ValueError`` where there is no g++ or for an unknown standard, ``WorkerFault`` and
        ``QueueFull`` like any job.
        """
        compiler = shutil.which("g++", path=native.PATH)
        if compiler is None:
            raise ValueError(
                "language 'cpp' needs g++, which this machine does not have on "
                f"{native.PATH}; install it, or point sandbox.endpoint at a service that has it"
            )
        if standard not in STANDARDS:
            raise ValueError(f"unknown C++ standard {standard!r}; use {', '.join(STANDARDS)}")
        job = _job(limits, sources, standard, seconds)
        key = _key(compiler, job)
        if key in self._kept:
            self.hits += 1
            self._kept.move_to_end(key)
            return self._kept[key]
        if key not in self._under_way:
            task = asyncio.create_task(self._compile(key, job))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key))
        # One caller that gives up must not end the work of the others.
        return await asyncio.shield(self._under_way[key])

    async def _compile(self, key: str, job: jobs.Job) -> Compiled:
        self.compilations += 1
        done = await self._run(job, job["seconds"])
        response = jobs.run_response(done.end, [_BINARY])
        assert response.run_result is not None
        binary = response.files.get(_BINARY) if response.run_result.return_code == 0 else None
        compiled = Compiled(response.run_result, binary)
        if response.run_result.status is CommandRunStatus.FINISHED:
            self._keep(key, compiled)
        return compiled

    def _keep(self, key: str, compiled: Compiled) -> None:
        self._kept[key] = compiled
        self._bytes += len(compiled.binary or "")
        while self._bytes > _CACHE_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= len(dropped.binary or "")


def _job(
    limits: SandboxLimits, sources: Mapping[str, str], standard: str, seconds: float | None
) -> jobs.Job:
    units = sorted(name for name in sources if name.endswith((".cpp", ".cc", ".cxx")))
    job = jobs.program_job(
        limits,
        "",
        stdin="",
        seconds=seconds,
        memory_mb=min(_MEMORY_MB, limits.max_memory_mb),
        contents={
            name: base64.b64encode(text.encode(errors="surrogatepass")).decode()
            for name, text in sources.items()
        },
        fetch=[_BINARY],
    )
    command = ["g++", f"-std={standard}", *_FLAGS, "-o", _BINARY, *units]
    return {**job, "native": {"profile": "compiler", "command": command}}


def _key(compiler: str, job: jobs.Job) -> str:
    digest = hashlib.sha256()
    for part in (compiler, *job["native"]["command"], *sorted(job["files"].items())):
        for text in (part,) if isinstance(part, str) else part:
            digest.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
    return digest.hexdigest()
