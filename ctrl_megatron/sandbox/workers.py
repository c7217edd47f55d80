"""The service's side of its workers: start them, give each one job at a time, replace one that
dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctrl_megatron.sandbox.census import MARK
from ctrl_megatron.sandbox.cgroups import NotDelegated, Subtree
from ctrl_megatron.sandbox.isolation import IsolationRefused, Level
from ctrl_megatron.sandbox.jail import frames
from ctrl_megatron.sandbox.jail.verdict import Verdict
from ctrl_megatron.sandbox.limits import SandboxLimits
from ctrl_megatron.sandbox.telemetry import Histogram
from ctrl_megatron.sandbox.turns import CLIENT, Turns

_FIRST_UID, _UID_BLOCKS, _UIDS_PER_SERVICE = 20_001, 256, 128
_START_SECONDS, _END_SECONDS = 60.0, 2.0
_JOB_MARGIN_SECONDS = 30.0
_ATTEMPTS = 3
_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from ctrl_megatron.sandbox.jail.zygote import main; main({fd})"
)


class WorkerFault(RuntimeError):
    """A worker failed, not the program that it ran."""


class QueueFull(RuntimeError):
    """More jobs wait than the service accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How to start workers."""

    level: Level
    limits: SandboxLimits
    python: str = os.path.realpath(sys.executable)
    """Interpreter that runs programs; only its standard library is used."""
    preload: tuple[str, ...] = ()
    """Modules imported once per worker besides the usual ones."""
    without: tuple[str, ...] = ()
    """Mechanisms not to try: ``namespaces``, ``seccomp``, ``landlock``."""


@dataclass(slots=True)
class PoolCounters:
    """What the workers did so far."""

    executions: int = 0
    timeouts: int = 0
    faults: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class JobResult:
    """Everything a job reported."""

    verdicts: tuple[Verdict, ...]
    end: dict[str, Any]


class Worker:
    """One worker process."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.isolation: dict[str, Any] = {}

    @classmethod
    async def start(
        cls, settings: WorkerSettings, scratch: str, number: int, cgroups: Subtree | None = None
    ) -> Worker:
        """Start and wait until it is isolated. Raises ``IsolationRefused``, ``WorkerFault`` or
        ``OSError``.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            root = str(Path(__file__).resolve().parents[2])
            boot = _BOOT.format(root=root, fd=theirs.fileno())
            process = subprocess.Popen(
                [
                    *(settings.python, "-I", "-S", "-B", "-X", "utf8", "-c", boot),
                    f"{MARK}{os.getpid()}",
                ],
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = cls(process, reader, writer)
        try:
            if cgroups is not None:
                # Before it has been told anything: all it starts is born there.
                cgroups.confine(number, process.pid, settings.limits)
            await worker._introduce(settings, scratch, number)
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def run(self, job: dict[str, Any], seconds: float) -> JobResult:
        """Run one job. Raises ``WorkerFault``, after which the worker must be stopped."""
        self._writer.write(frames.encode(job))
        try:
            async with asyncio.timeout(seconds):
                await self._writer.drain()
                message = await self._receive()
        except TimeoutError as error:
            raise WorkerFault(f"a worker did not answer within {seconds:.0f} s") from error
        except ConnectionError as error:
            raise WorkerFault("a worker died") from error
        if message["kind"] != "end":
            raise WorkerFault(message.get("reason", "a worker sent an unknown message"))
        return JobResult(tuple(Verdict(*told) for told in message.pop("verdicts")), message)

    async def stop(self) -> None:
        """Let the worker end, and its job with it; kill it if it does not."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _introduce(self, settings: WorkerSettings, scratch: str, number: int) -> None:
        staging, private = (tempfile.mkdtemp(dir=scratch, prefix=f"{number}-") for _ in range(2))
        setup = {
            "service_pid": os.getpid(),
            "level": settings.level,
            "staging": staging,
            "scratch": private,
            "user": _user(number) if os.getuid() == 0 else None,
            "without": settings.without,
            "preload": settings.preload,
            "limits": settings.limits.as_dict(),
        }
        self._writer.write(frames.encode(setup))
        try:
            async with asyncio.timeout(_START_SECONDS):
                answer = await self._receive()
        except TimeoutError as error:
            raise WorkerFault("a worker did not start in time") from error
        if answer["kind"] != "ready":
            raise IsolationRefused(answer["reason"])
        self.isolation = answer["isolation"]

    async def _receive(self) -> dict[str, Any]:
        try:
            (size,) = frames.HEADER.unpack(await self._reader.readexactly(frames.HEADER.size))
            return json.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerFault("a worker died") from error


@dataclass(slots=True)
class Pool:
    """Workers behind a queue of jobs; clients (``turns.CLIENT``) take turns."""

    settings: WorkerSettings
    size: int
    counters: PoolCounters = field(default_factory=PoolCounters)
    queue_seconds: Histogram = field(default_factory=Histogram)
    """From a job's arrival to its worker."""
    job_seconds: Histogram = field(default_factory=Histogram)
    """On the worker."""
    _turns: Turns[tuple[int, Worker | None]] = field(default_factory=Turns)
    _workers: dict[int, Worker] = field(default_factory=dict)
    _scratch: tempfile.TemporaryDirectory[str] | None = None
    _cgroups: Subtree | None = None
    _no_cgroups: str = ""
    """Why there is no limit on a worker's processes together."""

    async def start(self) -> None:
        """Start every worker. Raises ``IsolationRefused`` or ``WorkerFault``."""
        self._scratch = tempfile.TemporaryDirectory(prefix="sandbox-")
        os.chmod(self._scratch.name, 0o711)
        self._take_cgroups()
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self.size):
                    group.create_task(self._add(number))
        except* (IsolationRefused, WorkerFault, OSError) as errors:
            await self.stop()
            raise errors.exceptions[0] from None

    async def stop(self) -> None:
        """End every worker and remove what they left."""
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))
        self._workers.clear()
        if self._cgroups is not None:
            self._cgroups.close()
            self._cgroups = None
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    @property
    def scratch(self) -> str:
        """Directory for what the workers leave on disk; gone after ``stop``."""
        assert self._scratch is not None
        return self._scratch.name

    @property
    def isolation(self) -> dict[str, Any]:
        """The isolation that the workers reached (the same kernel gives all of them the same)."""
        reached = next((worker.isolation for worker in self._workers.values()), None)
        if reached is None:
            return {}
        counted = sorted(self._cgroups.controllers) if self._cgroups else []
        return {**reached, "cgroups": counted, "no_cgroups": self._no_cgroups}

    @property
    def waiting(self) -> int:
        """Jobs that wait for a worker."""
        return self._turns.waiting

    @property
    def free(self) -> int:
        """Workers without a job."""
        return self._turns.free

    @property
    def clients(self) -> int:
        """Clients with a job waiting."""
        return self._turns.clients

    async def run(self, job: dict[str, Any], *, seconds: float) -> JobResult:
        """Run a job on the next free worker; a fault of the worker is repeated on another one.

        ``seconds`` is what the job itself may take. Raises ``WorkerFault`` after the last attempt,
        ``QueueFull``.
        """
        if self.waiting >= self.settings.limits.queue:
            raise QueueFull(f"{self.waiting} jobs are waiting already")
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._run_once(job, seconds + _JOB_MARGIN_SECONDS)
            except WorkerFault:
                self.counters.faults += 1
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def _run_once(self, job: dict[str, Any], seconds: float) -> JobResult:
        arrived = time.perf_counter()
        number, worker = await self._turns.take(CLIENT.get())
        began = time.perf_counter()
        self.queue_seconds.add(began - arrived)
        try:
            if worker is None:
                worker = await self._restart(number)
            result = await worker.run(job, seconds)
        except BaseException:
            # Also when the caller was cancelled: what is left on the wire belongs to nobody.
            self._workers.pop(number, None)
            if worker is not None:
                await asyncio.shield(worker.stop())
            self._turns.give((number, None))
            raise
        self._turns.give((number, worker))
        self.job_seconds.add(time.perf_counter() - began)
        self.counters.executions += 1
        self.counters.timeouts += _timed_out(result)
        return result

    def _take_cgroups(self) -> None:
        if self.settings.level == "none":
            self._no_cgroups = "switched off by the configuration"
            return
        try:
            self._cgroups = Subtree.take()
        except NotDelegated as why:
            self._no_cgroups = str(why)

    async def _restart(self, number: int) -> Worker:
        self.counters.restarts += 1
        try:
            return await self._new(number)
        except (IsolationRefused, OSError) as error:
            raise WorkerFault(f"a worker could not be restarted: {error}") from error

    async def _add(self, number: int) -> None:
        self._turns.give((number, await self._new(number)))

    async def _new(self, number: int) -> Worker:
        assert self._scratch is not None
        worker = await Worker.start(self.settings, self._scratch.name, number, self._cgroups)
        self._workers[number] = worker
        return worker


def _user(number: int) -> int:
    """The user id of a worker started by root: its own on this machine, as far as ids below 65,536
    go, because limits on processes and leftover files are per user.
    """
    block = os.getpid() % _UID_BLOCKS
    return _FIRST_UID + block * _UIDS_PER_SERVICE + number % _UIDS_PER_SERVICE


def _timed_out(result: JobResult) -> bool:
    stopped = str(result.end.get("stopped"))
    return "timeout" in stopped or any(v.status == "timeout" for v in result.verdicts)
