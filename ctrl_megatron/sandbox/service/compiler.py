"""Compiles C++ programs inside the jail, each program once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ctrl_megatron.sandbox import wire
from ctrl_megatron.sandbox.jail.job import Job, JobReport
from ctrl_megatron.sandbox.jail.program import PATH
from ctrl_megatron.sandbox.limits import (
    COMPILATIONS_BYTES,
    COMPILER_MEMORY_MB,
    COMPILER_MESSAGE_CHARACTERS,
    SandboxLimits,
)
from ctrl_megatron.sandbox.service.jobs import job_response, program_job, to_base64

CPP_STANDARDS = ("c++11", "c++14", "c++17", "c++20")
DEFAULT_CPP_STANDARD = "c++17"
_CPP_FLAGS = ("-O2", "-w", "-pthread")
_BINARY = "main"
_RECORD_BYTES = 2048
"""Estimated size of a kept compilation beside its texts."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """The compiler's messages, and the binary (base64), None if compilation failed."""

    result: wire.CommandRunResult
    binary: str | None

    @property
    def size(self) -> int:
        """Approximate size in memory, in bytes."""
        texts = (self.binary, self.result.stdout, self.result.stderr)
        return sum(len(text or "") for text in texts) + _RECORD_BYTES


class Compiler:
    """Compiles C++ with g++ inside the jail. Each program is compiled once: equal sources, flags
    and compiler give the same binary.

    ``run_job`` runs one job on a worker. At most ``COMPILATIONS_BYTES`` are kept, failures
    included; the least recently used one is dropped first. A compilation that ran out of time is
    not kept.
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
        """Compile all ``.cpp`` files of ``sources`` (file name -> text) together.

        Raises ``ValueError`` if there is no g++ or the standard is unknown, ``WorkerFault`` and
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
        job = program_job(
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
        # The time limit is part of the key: a caller must not share a compilation with a shorter
        # limit.
        parts = json.dumps([compiler, command, job["seconds"], sorted(job["files"].items())])
        key = hashlib.sha256(parts.encode()).hexdigest()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if key not in self._under_way:
            task = asyncio.create_task(self._compile(key, job))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key))
        # Shielded: a caller that is cancelled must not end the compilation for the others.
        return await asyncio.shield(self._under_way[key])

    async def _compile(self, key: str, job: Job) -> Compilation:
        response = job_response(await self._run_job(job, job["seconds"]), [_BINARY])
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
