"""The pool of worker processes: starts them, gives each one job at a time, shares them fairly
between the waiting requests, and replaces a worker that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ctrl_megatron.exposition import DurationHistogram
from ctrl_megatron.sandbox.jail.isolation import IsolationRefused
from ctrl_megatron.sandbox.jail.job import Job, JobReport
from ctrl_megatron.sandbox.limits import ATTEMPTS
from ctrl_megatron.sandbox.service.cgroups import CgroupSubtree, NotDelegated
from ctrl_megatron.sandbox.service.fair_queue import FairQueue, Lease, RequestShare
from ctrl_megatron.sandbox.service.jobs import TIME_OVER
from ctrl_megatron.sandbox.service.problem_clock import ProblemClock
from ctrl_megatron.sandbox.service.scratch import Scratch
from ctrl_megatron.sandbox.service.worker import SandboxWorker, WorkerFault, WorkerSettings

CURRENT_SHARE: ContextVar[RequestShare | None] = ContextVar("sandbox_share", default=None)
"""The queue share of the request that the current task works on."""
_JOB_MARGIN_SECONDS = 30.0
_log = logging.getLogger(__name__)
_HONEST = {
    "kind": "program",
    "code": "print('well')",
    "prelude": "",
    "stdin": "",
    "seconds": 10.0,
    "wall_seconds": 60.0,
    "files": {},
    "fetch": [],
}
"""A job that fails only if the worker itself is broken."""


class QueueFull(RuntimeError):
    """The service accepts no more waiting jobs."""


@dataclass(slots=True)
class PoolCounters:
    """Counters of the workers' jobs since the start."""

    executions: int = 0
    timeouts: int = 0
    faults: int = 0
    """Jobs that ended with a failure of their worker."""
    restarts: int = 0
    broken: int = 0
    """Programs that brought down every worker that ran them."""
    cancelled: int = 0
    """Jobs that ended because their client left."""


_Place = tuple[int, SandboxWorker | None]
"""A worker's number, and the worker, or None if it has to be started."""


@dataclass(slots=True)
class WorkerPool:
    """Workers behind a fair queue of jobs."""

    settings: WorkerSettings
    size: int
    counters: PoolCounters = field(default_factory=PoolCounters)
    queue_seconds: DurationHistogram = field(default_factory=DurationHistogram)
    """Seconds from a job's arrival to the start on a worker."""
    job_seconds: DurationHistogram = field(default_factory=DurationHistogram)
    """Seconds of jobs on their worker."""
    queue: FairQueue[_Place] = field(default_factory=FairQueue)
    _workers: dict[int, SandboxWorker] = field(default_factory=dict)
    _cancelling: set[asyncio.Task[None]] = field(default_factory=set)
    _scratch: Scratch | None = None
    _cgroups: CgroupSubtree | None = None
    _no_cgroups: str = ""
    """Why no cgroup limits the processes of a worker; empty if one does."""

    async def start(self) -> None:
        """Start every worker. Raises ``IsolationRefused`` or ``WorkerFault``."""
        self._scratch = Scratch()
        if self.settings.level == "none":
            self._no_cgroups = "switched off by the configuration"
        else:
            try:
                self._cgroups = CgroupSubtree.split_own_cgroup()
            except NotDelegated as why:
                self._no_cgroups = str(why)

        async def add(number: int) -> None:
            self.queue.add((number, await self._new(number)))

        # Every start runs to its end: a cancelled one would remove its directories at the same time
        # as `stop` does.
        ends = await asyncio.gather(*map(add, range(self.size)), return_exceptions=True)
        refusals = [end for end in ends if end is not None]
        if refusals:
            await self.stop()
            raise refusals[0]

    async def stop(self) -> None:
        """End all workers and remove their files."""
        for task in self._cancelling:
            task.cancel()
        await asyncio.gather(*self._cancelling, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))
        self._workers.clear()
        if self._cgroups is not None:
            self._cgroups.close()
            self._cgroups = None
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    @property
    def scratch(self) -> str:
        """Directory for the workers' files; removed by ``stop``."""
        assert self._scratch is not None
        return self._scratch.name

    @property
    def isolation(self) -> dict[str, Any]:
        """The isolation that the workers reached, which is the same for all of them."""
        reached = next((worker.isolation for worker in self._workers.values()), None)
        if reached is None:
            return {}
        counted = sorted(self._cgroups.controllers) if self._cgroups else []
        return {**reached, "cgroups": counted, "no_cgroups": self._no_cgroups}

    async def run(self, job: Job, seconds: float, clock: ProblemClock | None = None) -> JobReport:
        """Run a job on the next free worker; after a fault of the worker it is repeated on another
        one.

        If a job brings down ``ATTEMPTS`` workers while an honest job runs well, the program has
        failed: the report has ``stopped`` ``broke``. ``seconds`` is the job's own limit
        of processor time. ``clock`` is the clock of its problem: when its time is over the job is
        ended, or not started, and ``stopped`` is ``job_timeout``. Raises ``WorkerFault`` if the
        honest job fails too, and ``QueueFull``.
        """
        if self.queue.waiting >= self.settings.limits.queue:
            raise QueueFull(f"{self.queue.waiting} jobs are waiting already")
        if clock is not None and clock.is_over:
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
        """Raise ``fault`` unless a harmless program runs well."""
        job = {**_HONEST, "memory_mb": self.settings.limits.memory_mb}
        report = await self._run_once(job, job["seconds"], None)
        if report["stopped"] or report["exit"] != 0:
            raise fault

    async def _run_once(self, job: Job, seconds: float, clock: ProblemClock | None) -> JobReport:
        arrived = time.perf_counter()
        # A job outside any request gets a share of its own.
        share = CURRENT_SHARE.get() or self.queue.register_request("")
        lease = await self.queue.acquire(share, seconds)
        number, worker = lease.item
        began = time.perf_counter()
        self.queue_seconds.add(began - arrived)
        if clock is not None and clock.is_over:
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
                with (
                    clock.counting_time(worker.request_cancel)
                    if clock
                    else contextlib.nullcontext()
                ):
                    most = seconds * self.settings.limits.wall_factor
                    report = await worker.run(job, most + _JOB_MARGIN_SECONDS)
            except asyncio.CancelledError:
                # Not awaited: the caller must not wait for the worker.
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
        if clock is not None:
            clock.spend(report["cpu"])
        if report["stopped"] == "cancelled":
            report["stopped"] = "job_timeout"
        self.job_seconds.add(time.perf_counter() - began)
        self.counters.executions += 1
        timeouts = (status == "timeout" for _, status, *_ in report["verdicts"])
        self.counters.timeouts += report["stopped"] in TIME_OVER or any(timeouts)
        return report

    async def _cancel(self, lease: Lease[_Place], worker: SandboxWorker) -> None:
        """End a job whose client left; the worker is free again after the job's end."""
        self.counters.cancelled += 1
        try:
            await worker.cancel()
        except WorkerFault:
            await self._replace(lease, worker)
        else:
            self.queue.release(lease, (lease.item[0], worker))

    async def _replace(self, lease: Lease[_Place], worker: SandboxWorker | None) -> None:
        """Stop a worker that may be broken; the next job in its place starts a new one."""
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
    """The report of a job that did not run to an end."""
    return {
        "kind": "end",
        "verdicts": [],
        "tests": -1,
        "stopped": stopped,
        "exit": None,
        "wall": 0.0,
        "cpu": 0.0,
        "stdout": {"bytes": "", "truncated": False},
        "stderr": {"bytes": "", "truncated": False},
        "files": {},
    }
