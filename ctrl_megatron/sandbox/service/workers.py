"""The pool of worker processes: start them, give each one job at a time, fairly to the requests
that wait, replace one that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from ctrl_megatron.sandbox.jail import files, frames
from ctrl_megatron.sandbox.jail.isolation import IsolationRefused
from ctrl_megatron.sandbox.jail.supervisor import Job, JobReport
from ctrl_megatron.sandbox.limits import ATTEMPTS, Level, SandboxLimits
from ctrl_megatron.sandbox.service.cgroups import CgroupSubtree, NotDelegated
from ctrl_megatron.sandbox.service.fair_queue import FairQueue, Lease, RequestShare
from ctrl_megatron.sandbox.service.problem_clock import ProblemClock
from ctrl_megatron.sandbox.service.telemetry import DurationHistogram

PROCESS_MARK = "sandbox-of-"
"""In the command line of every process of a worker, followed by the service's pid."""
CURRENT_SHARE: ContextVar[RequestShare | None] = ContextVar("sandbox_share", default=None)
"""Of the request that the current task works on."""
_FIRST_UID, _UID_BLOCKS, _UIDS_PER_SERVICE = 20_001, 256, 128
_START_SECONDS, _END_SECONDS = 60.0, 2.0
_JOB_MARGIN_SECONDS = 30.0
_CANCEL_SECONDS = 5.0
_SCRATCH_MODE = 0o711
_log = logging.getLogger(__name__)
_HONEST = {
    "kind": "program",
    "code": "print('well')",
    "prelude": "",
    "stdin": "",
    "seconds": 10.0,
    "files": {},
    "fetch": [],
}
"""A job that only a worker which is broken itself fails."""
_ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Of a worker, and no more: sets of texts have one order on all of them, so that equal programs get
equal verdicts. A worker clears it before its first job."""
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
    """Jobs that broke off with their worker."""
    restarts: int = 0
    broken: int = 0
    """Programs that were judged to bring every worker down."""
    cancelled: int = 0
    """Jobs whose client left."""


@dataclass(slots=True, eq=False)
class SandboxWorker:
    """One worker process."""

    _process: subprocess.Popen[bytes]
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _folders: tuple[str, ...] = ()
    """Its own, below the pool's scratch directory."""
    _answer: asyncio.Task[dict[str, Any]] | None = None
    """What is on its way."""
    isolation: dict[str, Any] = field(default_factory=dict)
    """Reached; empty before it is started."""

    @classmethod
    async def start(
        cls,
        settings: WorkerSettings,
        scratch: str,
        number: int,
        cgroups: CgroupSubtree | None = None,
    ) -> SandboxWorker:
        """Start, isolate. Raises ``IsolationRefused``, ``WorkerFault`` or ``OSError``."""
        ours, theirs = socket.socketpair()
        with theirs:
            root = str(Path(__file__).resolve().parents[3])
            boot = _BOOT.format(root=root, fd=theirs.fileno())
            process = subprocess.Popen(
                [
                    *(settings.python, "-s", "-P", "-S", "-B", "-X", "utf8", "-c", boot),
                    f"{PROCESS_MARK}{os.getpid()}",
                ],
                env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = cls(process, reader, writer)
        try:
            if cgroups is not None:
                # Before it knows anything: all it starts is born there.
                cgroups.confine(number, process.pid, settings.limits)
            await worker._introduce(settings, scratch, number)
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def run(self, job: Job, seconds: float) -> JobReport:
        """Run one job. Raises ``WorkerFault``, after which the worker must be stopped."""
        message = await self._ask(job, seconds)
        if message["kind"] != "end":
            raise WorkerFault(message.get("reason", "a worker sent an unknown message"))
        return cast("JobReport", message)

    def end_job(self) -> None:
        """Cut the running job short: its report comes at once, ``stopped`` is ``cancelled``."""
        self._writer.write(frames.encode(None))

    async def cancel(self) -> None:
        """Give up the job whose ``run`` was cancelled. Raises ``WorkerFault`` like ``run``."""
        assert self._answer is not None
        self.end_job()
        await self._arrived(_CANCEL_SECONDS)

    async def stop(self) -> None:
        """Let the worker end, and its job with it; kill it if it does not."""
        if self._answer is not None:
            self._answer.cancel()
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
        for folder in self._folders:
            try:
                # A program of our own user that nothing held back may have closed it to us.
                os.chmod(os.path.dirname(folder), _SCRATCH_MODE)
                files.remove_tree(folder)
            except OSError as error:
                # The worker is gone all the same, and its place wanted.
                _log.warning("%s of an ended worker stays behind: %s", folder, error)

    async def _introduce(self, settings: WorkerSettings, scratch: str, number: int) -> None:
        self._folders = staging, private = (
            tempfile.mkdtemp(dir=scratch, prefix=f"{number}-"),
            tempfile.mkdtemp(dir=scratch, prefix=f"{number}-"),
        )
        setup = {
            "service_pid": os.getpid(),
            "level": settings.level,
            "staging": staging,
            "scratch": private,
            "user": _user(number) if os.getuid() == 0 else None,
            "without": settings.without,
            "preload": settings.preload,
            "limits": asdict(settings.limits),
        }
        answer = await self._ask(setup, _START_SECONDS)
        if answer["kind"] != "ready":
            raise IsolationRefused(answer["reason"])
        self.isolation = answer["isolation"]

    async def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        self._writer.write(frames.encode(message))
        # A task of its own: a caller that is cancelled must not leave half an answer on the wire.
        self._answer = asyncio.create_task(self._read())
        return await self._arrived(seconds)

    async def _read(self) -> dict[str, Any]:
        await self._writer.drain()
        (size,) = frames.HEADER.unpack(await self._reader.readexactly(frames.HEADER.size))
        return json.loads(await self._reader.readexactly(size))

    async def _arrived(self, seconds: float) -> dict[str, Any]:
        assert self._answer is not None
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(self._answer)
        except TimeoutError as error:
            raise WorkerFault(f"a worker did not answer within {seconds:.0f} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerFault("a worker died") from error


_Place = tuple[int, SandboxWorker | None]
"""The number of a worker, and the worker unless it has to be started."""


@dataclass(slots=True)
class WorkerPool:
    """Workers behind a queue of jobs; requests take turns."""

    settings: WorkerSettings
    size: int
    counters: PoolCounters = field(default_factory=PoolCounters)
    queue_seconds: DurationHistogram = field(default_factory=DurationHistogram)
    """From a job's arrival to its worker."""
    job_seconds: DurationHistogram = field(default_factory=DurationHistogram)
    """On the worker."""
    queue: FairQueue[_Place] = field(default_factory=FairQueue)
    _workers: dict[int, SandboxWorker] = field(default_factory=dict)
    _cancelling: set[asyncio.Task[None]] = field(default_factory=set)
    _scratch: tempfile.TemporaryDirectory[str] | None = None
    _cgroups: CgroupSubtree | None = None
    _no_cgroups: str = ""
    """Why there is no limit on a worker's processes together."""

    async def start(self) -> None:
        """Start every worker. Raises ``IsolationRefused`` or ``WorkerFault``."""
        self._scratch = tempfile.TemporaryDirectory(prefix="sandbox-")
        os.chmod(self._scratch.name, _SCRATCH_MODE)
        if self.settings.level == "none":
            self._no_cgroups = "switched off by the configuration"
        else:
            try:
                self._cgroups = CgroupSubtree.take()
            except NotDelegated as why:
                self._no_cgroups = str(why)

        async def add(number: int) -> None:
            self.queue.add((number, await self._new(number)))

        # Each comes to its own end: a start that is cancelled while it removes its directories
        # would go on removing them beside `stop`.
        ends = await asyncio.gather(*map(add, range(self.size)), return_exceptions=True)
        refusals = [end for end in ends if end is not None]
        if refusals:
            await self.stop()
            raise refusals[0]

    async def stop(self) -> None:
        """End every worker and remove what they left."""
        for task in self._cancelling:
            task.cancel()
        await asyncio.gather(*self._cancelling, return_exceptions=True)
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

    async def run(self, job: Job, seconds: float, clock: ProblemClock | None = None) -> JobReport:
        """Run a job on the next free worker; a fault of the worker is repeated on another one.

        A job that brings down as many workers as it may, while an honest one runs well, is its
        program's failure: the report has ``stopped`` ``broke``. ``seconds`` is what the job itself
        may take. ``clock`` is its problem's: when that is over the job ends, or does not begin, and
        ``stopped`` is ``job_timeout``. Raises ``WorkerFault`` where the honest one fails too,
        ``QueueFull``.
        """
        if self.queue.waiting >= self.settings.limits.queue:
            raise QueueFull(f"{self.queue.waiting} jobs are waiting already")
        if clock is not None and clock.over:
            return _no_report("job_timeout")
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._run_once(job, seconds, clock)
            except WorkerFault as fault:
                self.counters.faults += 1
                if attempt == ATTEMPTS:
                    await self._require_honest_run(fault)
        self.counters.broken += 1
        return _no_report("broke")

    async def _require_honest_run(self, fault: WorkerFault) -> None:
        """Raise ``fault`` unless a program without tricks runs."""
        job = {**_HONEST, "memory_mb": self.settings.limits.memory_mb}
        report = await self._run_once(job, job["seconds"], None)
        if report["stopped"] or report["exit"] != 0:
            raise fault

    async def _run_once(self, job: Job, seconds: float, clock: ProblemClock | None) -> JobReport:
        arrived = time.perf_counter()
        # A job that belongs to no request is alone.
        share = CURRENT_SHARE.get() or self.queue.enter("")
        lease = await self.queue.acquire(share, seconds)
        number, worker = lease.item
        began = time.perf_counter()
        self.queue_seconds.add(began - arrived)
        if clock is not None and clock.over:
            self.queue.release(lease, lease.item)
            return _no_report("job_timeout")
        try:
            if worker is None:
                self.counters.restarts += 1
                try:
                    worker = await self._new(number)
                except (IsolationRefused, OSError) as error:
                    raise WorkerFault(f"a worker could not be restarted: {error}") from error
            try:
                with clock.running(worker.end_job) if clock else contextlib.nullcontext():
                    report = await worker.run(job, seconds + _JOB_MARGIN_SECONDS)
            except asyncio.CancelledError:
                # Not awaited: whoever cancelled waits for nothing.
                task = asyncio.create_task(self._cancel(lease, worker))
                self._cancelling.add(task)
                task.add_done_callback(self._cancelling.discard)
                raise
        except asyncio.CancelledError:
            if worker is None:
                self.queue.release(lease, (number, None))
            raise
        except BaseException:
            await self._replace(lease, worker)
            raise
        self.queue.release(lease, (number, worker))
        if report["stopped"] == "cancelled":
            report["stopped"] = "job_timeout"
        self.job_seconds.add(time.perf_counter() - began)
        self.counters.executions += 1
        timeouts = (status == "timeout" for _, status, *_ in report["verdicts"])
        self.counters.timeouts += "timeout" in (report["stopped"] or "") or any(timeouts)
        return report

    async def _cancel(self, lease: Lease[_Place], worker: SandboxWorker) -> None:
        """The job's client left; the worker is free again once the job has ended."""
        self.counters.cancelled += 1
        try:
            await worker.cancel()
        except WorkerFault:
            await self._replace(lease, worker)
        else:
            self.queue.release(lease, (lease.item[0], worker))

    async def _replace(self, lease: Lease[_Place], worker: SandboxWorker | None) -> None:
        """Stop a worker that cannot be trusted; the next job on its place starts another."""
        number, _ = lease.item
        self._workers.pop(number, None)
        try:
            if worker is not None:
                await asyncio.shield(worker.stop())
        finally:
            self.queue.release(lease, (number, None))

    async def _new(self, number: int) -> SandboxWorker:
        assert self._scratch is not None
        worker = await SandboxWorker.start(self.settings, self._scratch.name, number, self._cgroups)
        self._workers[number] = worker
        return worker


def _no_report(stopped: str) -> JobReport:
    """Of a job that nothing came of."""
    return {
        "kind": "end",
        "verdicts": [],
        "stopped": stopped,
        "exit": None,
        "wall": 0.0,
        "stdout": {"bytes": "", "truncated": False},
        "stderr": {"bytes": "", "truncated": False},
        "files": {},
    }


def _user(number: int) -> int:
    """The user id of a worker started by root: its own on this machine, as far as ids below 65,536
    go, because limits on processes and leftover files are per user.
    """
    block = os.getpid() % _UID_BLOCKS
    return _FIRST_UID + block * _UIDS_PER_SERVICE + number % _UIDS_PER_SERVICE
