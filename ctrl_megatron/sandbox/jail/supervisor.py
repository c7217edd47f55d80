"""Reads a worker's jobs one after another: hands out code and tests, drains output, keeps the
clock, has everything ended, reports.

It holds tests and expected values, so it forks nothing: the forker does, whose memory never held
them. Verdicts come back on a pipe that no candidate has, with a nonce.
"""

from __future__ import annotations

import base64
import os
import select
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ctrl_megatron.sandbox.jail import connection, disk, files, frames
from ctrl_megatron.sandbox.jail.forker import Forker
from ctrl_megatron.sandbox.jail.streams import Descriptors, Output, Verdicts
from ctrl_megatron.sandbox.jail.worker import Worker

_JOB_BYTES = 1 << 30
_REPORT_BYTES = 64 << 20
_GRACE_SECONDS = 2.0
_PHASES = 3
"""What a judge may do between two verdicts: load the program, run the setup, run a test."""
_CHUNK = 1 << 16
_TICK_SECONDS = 0.05
"""Between two looks at the verdicts, and at a directory that no file system bounds."""


class ServiceGone(Exception):
    """Nobody waits for the job any more."""


def serve(control: int, forker: Forker, worker: Worker) -> NoReturn:
    """Run the jobs that come on the socket ``control`` until the service closes it."""
    status = 1
    try:
        service = socket.socket(fileno=os.dup(control))
        while True:
            ready = select.select([control, forker], [], [])[0]
            if forker in ready:
                raise ConnectionError("the forker of the worker ended")
            if not service.recv(1, socket.MSG_PEEK):
                break
            job = frames.receive(control, limit=_JOB_BYTES)
            try:
                with _directory(worker) as directory:
                    report = _Job(control, forker, worker, directory, job).run()
            except ServiceGone:
                break
            frames.send(control, report)
        forker.close()
        status = 0
    except BaseException as error:
        sys.stderr.write(f"sandbox supervisor: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(status)


@contextmanager
def _directory(worker: Worker) -> Iterator[str | None]:
    """A job's private directory where it has no file system of its own; removed afterwards."""
    if worker.isolated:
        yield None
        return
    path = os.path.join(worker.scratch, os.urandom(8).hex())
    os.mkdir(path, 0o700)
    try:
        yield path
    finally:
        disk.remove_tree(path)


class _Job:
    """State of the running job; ``stopped`` says why it was cut short, if it was."""

    def __init__(
        self,
        control: int,
        forker: Forker,
        worker: Worker,
        directory: str | None,
        job: dict[str, Any],
    ) -> None:
        self._control = control
        self._forker = forker
        self._worker = worker
        self._directory = directory
        self._job = job
        self._judged = job["kind"] == "asserts"
        self._fds = Descriptors()
        self._selector = selectors.DefaultSelector()
        self._stdout = Output(worker.limits.output_bytes)
        self._stderr = Output(worker.limits.output_bytes)
        self._stdin = memoryview(b"")
        self._verdicts = Verdicts(os.urandom(16).hex())
        self._files: dict[str, str] = {}
        self._stopped: str | None = None
        self._exit: int | None = None
        self._running = True
        self._ready: socket.socket | None = None
        """The line to a candidate that the judge has not asked for yet."""
        self._deadline = self._job_deadline = self._patience = self._ticked = 0.0

    def run(self) -> dict[str, Any]:
        """The report for the service."""
        started = time.monotonic()
        try:
            try:
                self._begin(started)
                self._watch()
            finally:
                statuses = self._forker.end()
            for fd in (self._stdout_given, self._stderr_given):
                self._fds.close_one(fd)
            self._drain_rest()
            return self._report(statuses, time.monotonic() - started)
        finally:
            self._selector.close()
            self._fds.close()
            if self._ready is not None:
                self._ready.close()

    def _begin(self, now: float) -> None:
        seconds, limits = float(self._job["seconds"]), self._worker.limits
        self._deadline = now + seconds
        self._job_deadline = now + max(limits.job_seconds, seconds + _GRACE_SECONDS)
        self._on_read(self._control, self._service_gone)
        stdout, self._stdout_given = self._fds.pipe()
        stderr, self._stderr_given = self._fds.pipe()
        self._outputs = {stdout: self._stdout, stderr: self._stderr}
        for fd, output in self._outputs.items():
            self._on_read(fd, lambda fd=fd, output=output: self._drain(fd, output))
        if self._judged:
            # The judge keeps the clock of each test; ours only catches a judge that hangs in a
            # comparison.
            self._patience = _PHASES * seconds + _GRACE_SECONDS
            self._deadline = now + self._patience
            self._begin_judge()
        else:
            self._begin_program()

    def _begin_judge(self) -> None:
        spec, given = self._fds.pipe()
        verdicts, verdicts_given = self._fds.pipe()
        os.set_blocking(verdicts, False)
        self._verdicts_fd = verdicts
        asks, asks_given = socket.socketpair()
        self._fds.keep(asks)
        self._forker.judge(spec, verdicts_given, asks_given.fileno())
        asks_given.close()
        self._fds.close_one(spec)
        self._fds.close_one(verdicts_given)
        self._ready = self._new_candidate()
        self._on_read(asks.fileno(), lambda: self._judge_asks(asks))
        names = ("setup", "tests", "stubs", "seconds", "run_all", "memory_mb")
        told = {name: self._job[name] for name in names}
        told["max_timeouts"] = self._worker.limits.max_timeouts
        self._tell(given, {**told, "nonce": self._verdicts.nonce})

    def _begin_program(self) -> None:
        spec, given = self._fds.pipe()
        report, report_given = self._fds.pipe()
        stdin_given, stdin = self._fds.pipe()
        ends = (spec, report_given, stdin_given, self._stdout_given, self._stderr_given)
        self._forker.program(*ends)
        for fd in ends:
            self._fds.close_one(fd)
        self._on_read(report, lambda: self._child_report(report))
        names = ("code", "prelude", "seconds", "memory_mb")
        told = {name: self._job[name] for name in names}
        told |= {"native": self._job.get("native"), "fetch": self._job.get("fetch", [])}
        self._tell(given, {**told, **self._place()})
        self._stdin = memoryview(base64.b64decode(self._job["stdin"]))
        os.set_blocking(stdin, False)
        self._selector.register(stdin, selectors.EVENT_WRITE, lambda: self._feed(stdin))

    def _new_candidate(self) -> socket.socket:
        """Our end of the line to a new candidate; what ran before is ended."""
        line, line_given = socket.socketpair()
        spec, given = self._fds.pipe()
        with line_given:
            self._forker.candidate(
                spec, line_given.fileno(), self._stdout_given, self._stderr_given
            )
        self._fds.close_one(spec)
        told = {name: self._job[name] for name in ("code", "prelude", "memory_mb")}
        self._tell(given, {**told, **self._place()})
        return line

    def _place(self) -> dict[str, Any]:
        return {"directory": self._directory, "files": self._job.get("files", {})}

    def _tell(self, fd: int, spec: dict[str, Any]) -> None:
        frames.send(fd, spec)
        self._fds.close_one(fd)

    def _judge_asks(self, asks: socket.socket) -> None:
        """Give the judge a candidate; its end is the end of the job."""
        if asks.recv(1) != connection.NEW_CANDIDATE:
            self._running = False
            return
        line, self._ready = self._ready or self._new_candidate(), None
        with line:
            socket.send_fds(asks, [b"candidate"], [line.fileno()])

    def _watch(self) -> None:
        # Without a tick nothing needs a look before something is to be read.
        ticks = self._judged or not self._worker.isolated
        while self._running and self._stopped is None:
            left = min(self._deadline, self._job_deadline) - time.monotonic()
            if left <= 0:
                self._stopped = "timeout" if self._deadline <= self._job_deadline else "job_timeout"
                break
            for key, _ in self._selector.select(min(left, _TICK_SECONDS) if ticks else left):
                key.data()
            if ticks:
                self._tick()

    def _tick(self) -> None:
        """What is looked at now and then: a wake-up per verdict would cost more than the test."""
        now = time.monotonic()
        if now < self._ticked + _TICK_SECONDS:
            return
        self._ticked = now
        if self._judged and self._verdicts.take(self._verdicts_fd):
            self._deadline = now + self._patience
        limit = self._worker.limits.disk_mb << 20
        if self._directory is not None and disk.exceeds(self._directory, limit):
            self._stopped = "disk"

    def _on_read(self, fd: int, action: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, action)

    def _service_gone(self) -> None:
        raise ServiceGone("the service closed the connection during a job")

    def _drain(self, fd: int, output: Output) -> None:
        data = os.read(fd, _CHUNK)
        if not data:
            self._selector.unregister(fd)
        output.add(data)
        if output.flooded:
            self._stopped = "output"

    def _feed(self, fd: int) -> None:
        try:
            self._stdin = self._stdin[os.write(fd, self._stdin[:_CHUNK]) :]
        except BrokenPipeError:
            self._stdin = self._stdin[:0]
        if not self._stdin:
            self._selector.unregister(fd)
            self._fds.close_one(fd)

    def _child_report(self, fd: int) -> None:
        """Take the report of init; its end is the end of the job."""
        try:
            told = frames.receive(fd, limit=_REPORT_BYTES)
        except frames.PeerGone:
            self._running = False
            return
        self._exit, self._files = told["exit"], told["files"]

    def _drain_rest(self) -> None:
        for fd, output in self._outputs.items():
            while not output.flooded and (data := os.read(fd, _CHUNK)):
                output.add(data)
            if output.flooded:
                self._stopped = self._stopped or "output"
        if self._judged:
            self._verdicts.take(self._verdicts_fd)

    def _report(self, statuses: dict[str, int], wall: float) -> dict[str, Any]:
        finished = self._exit is not None
        if self._judged:
            finished = self._verdicts.done and statuses["judge"] == 0
            self._exit = statuses.get("candidate")
        if not finished and self._stopped is None:
            return {"kind": "fault", "reason": f"the job broke off: {statuses}"}
        wanted = self._job.get("fetch", [])
        if self._directory is not None:
            self._files = files.fetch(self._directory, wanted)
        return {
            "kind": "end",
            "verdicts": self._verdicts.told,
            "stopped": self._stopped,
            "exit": self._exit,
            "wall": wall,
            "stdout": self._stdout.report(),
            "stderr": self._stderr.report(),
            "files": self._files,
        }
