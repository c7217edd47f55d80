"""Reads a worker's jobs one after another: hands out code and tests, drains output, keeps the
clock, has everything ended, reports.

It holds tests and expected values, so it forks nothing: the fork server does, whose memory never
held them. Verdicts come back on a pipe that no candidate has, with a nonce.
"""

from __future__ import annotations

import base64
import fcntl
import math
import os
import select
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypedDict

from ctrl_megatron.sandbox.jail import files, frames
from ctrl_megatron.sandbox.jail.fork_server import ForkServer
from ctrl_megatron.sandbox.jail.isolation import Confinement
from ctrl_megatron.sandbox.jail.remote_calls import NEW_CANDIDATE

_JOB_BYTES = 1 << 30
_REPORT_BYTES = 64 << 20
_GRACE_SECONDS = 2.0
_LATE_SECONDS = 0.1
"""How long after a test's time the judge is ended; one that runs Python ends the test itself."""
_VERDICT_PARTS = 4
_CANCEL = None
"""What the service sends in place of a job to give up the running one."""
_CHUNK = 1 << 16
_TICK_SECONDS = 0.05
"""Between two looks at the verdicts, and at a directory that no file system bounds."""


Job = dict[str, Any]
"""What a worker is to do. ``kind`` is ``program`` (with ``stdin``, ``files``, ``fetch`` and perhaps
``native`` and ``output_bytes``) or ``asserts`` (with ``setup``, ``tests``, ``marked``, ``stubs``,
``classes``, ``exceptions``, ``shared_classes``, ``run_all``, ``problem_seconds``);
both have ``code``, ``prelude``, ``seconds``, ``memory_mb``."""


class JobReport(TypedDict):
    """What a worker answers to a job that it could run."""

    kind: str
    """``end``; a worker that failed answers ``fault`` with a ``reason``."""
    verdicts: list[list[Any]]
    """Of ``asserts``, for each test that was run: index, status, reason, seconds."""
    stopped: str | None
    """Why it was cut short: ``timeout``, ``output``, ``disk``, ``fetch``, ``cancelled``. The
    service adds ``job_timeout``, where it cancelled the job because the time of the whole problem
    was over, and ``broke`` for a program that brought its workers down."""
    exit: int | None
    """Wait status of the program."""
    wall: float
    """Seconds."""
    stdout: dict[str, Any]
    """``bytes`` in base64, and whether they are ``truncated``."""
    stderr: dict[str, Any]
    files: dict[str, str]
    """Fetched path -> base64 content."""


class ServiceGone(Exception):
    """Nobody waits for the job any more."""


def serve_jobs(control: int, fork_server: ForkServer, confinement: Confinement) -> NoReturn:
    """Run the jobs that come on the socket ``control`` until the service closes it."""
    status = 1
    try:
        service = socket.socket(fileno=os.dup(control))
        while True:
            ready = select.select([control, fork_server], [], [])[0]
            if fork_server in ready:
                raise ConnectionError("the fork server of the worker ended")
            if not service.recv(1, socket.MSG_PEEK):
                break
            job = frames.receive(control, limit=_JOB_BYTES)
            if job is _CANCEL:
                continue  # it was over already
            try:
                with _directory(confinement) as directory:
                    report = _JobRun(control, fork_server, confinement, directory, job).run()
            except ServiceGone:
                break
            frames.send(control, report)
        fork_server.close()
        status = 0
    except BaseException as error:
        sys.stderr.write(f"sandbox supervisor: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(status)


@contextmanager
def _directory(confinement: Confinement) -> Iterator[str | None]:
    """A job's private directory where it has no file system of its own; removed afterwards."""
    if confinement.isolated:
        yield None
        return
    path = os.path.join(confinement.scratch, os.urandom(8).hex())
    os.mkdir(path, 0o700)
    try:
        yield path
    finally:
        files.remove_tree(path)


class _CapturedOutput:
    """One output stream of the program: keeps the first ``keep`` bytes, counts the rest."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept = bytearray()
        self._seen = 0

    def add(self, data: bytes) -> None:
        self._kept += data[: self._keep - len(self._kept)]
        self._seen += len(data)

    @property
    def flooded(self) -> bool:
        """Whether the program prints without end."""
        return self._seen > 4 * self._keep

    def report(self) -> dict[str, Any]:
        text = base64.b64encode(self._kept).decode()
        return {"bytes": text, "truncated": self._seen > len(self._kept)}


class _VerdictPipe:
    """What the judge has told so far, every frame of it with this job's ``nonce``."""

    def __init__(self) -> None:
        self.nonce = os.urandom(16).hex()
        self.verdicts: list[list[Any]] = []
        self.complete = False
        """The judge has told all."""
        self.until = math.inf
        """When the judge wants to be ready with what it does."""
        self._unread = b""

    def begin(self) -> None:
        """A judge begins; what another left half said is lost."""
        self._unread, self.until = b"", math.inf

    def read(self, fd: int) -> None:
        """Read what is there on a descriptor that does not block.

        Raises ``FrameError`` for a frame without the nonce.
        """
        while True:
            try:
                data = os.read(fd, _CHUNK)
            except BlockingIOError:
                break
            if not data:
                break
            self._unread += data
        messages, self._unread = frames.split(self._unread)
        for nonce, *verdict in messages:
            if nonce != self.nonce:
                raise frames.FrameError("a verdict without this job's nonce")
            if not verdict:
                self.complete = True
            if len(verdict) in (1, 1 + _VERDICT_PARTS):
                self.until = verdict.pop()
            if verdict:
                self.verdicts.append(verdict)


class _JobRun:
    """State of the running job; ``stopped`` says why it was cut short, if it was."""

    def __init__(
        self,
        control: int,
        fork_server: ForkServer,
        confinement: Confinement,
        directory: str | None,
        job: Job,
    ) -> None:
        self._control = control
        self._fork_server = fork_server
        self._confinement = confinement
        self._directory = directory
        self._job = job
        self._judged = job["kind"] == "asserts"
        self._open: set[int] = set()
        """Descriptors of this job; none outlives it."""
        self._sockets: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        limit = confinement.limits.output_bytes
        self._stdout = _CapturedOutput(job.get("output_bytes", limit))
        self._stderr = _CapturedOutput(limit)
        self._verdicts = _VerdictPipe()
        self._files: dict[str, str] | None = {}
        self._stopped: str | None = None
        self._exit: int | None = None
        self._running = True
        self._spare: socket.socket | None = None
        """The line to a candidate that the judge has not asked for yet."""
        self._requests: socket.socket | None = None
        """Where the judge asks for candidates."""
        self._ended_judge = False
        """The judge was ended at its last test."""
        self._deadline = self._ticked = 0.0

    def run(self) -> dict[str, Any]:
        """The report for the service."""
        started = time.monotonic()
        try:
            try:
                self._begin(started)
                self._watch()
            finally:
                statuses = self._fork_server.end()
            self._close(self._stdout_given, self._stderr_given)
            self._drain_rest()
            return self._report(statuses, time.monotonic() - started)
        finally:
            self._selector.close()
            self._close(*self._open)
            for line in filter(None, (*self._sockets, self._spare)):
                line.close()

    def _begin(self, now: float) -> None:
        seconds = float(self._job["seconds"])
        self._deadline = now + seconds
        self._on_read(self._control, self._service_speaks)
        stdout, self._stdout_given = self._pipe()
        stderr, self._stderr_given = self._pipe()
        self._outputs = {stdout: self._stdout, stderr: self._stderr}
        for fd, output in self._outputs.items():
            self._on_read(fd, lambda fd=fd, output=output: self._drain(fd, output))
        if self._judged:
            # The judge keeps the clock of each test; ours only catches a judge that hangs in C.
            self._begin_judge()
        else:
            self._begin_program()

    def _begin_judge(self) -> None:
        """Start a judge for the tests that have no verdict yet."""
        self._deadline = time.monotonic() + float(self._job["seconds"]) + _GRACE_SECONDS
        self._verdicts.begin()
        told = [verdict[1] for verdict in self._verdicts.verdicts]
        spec, given = self._pipe()
        self._verdicts_fd, verdicts_given = self._pipe()
        os.set_blocking(self._verdicts_fd, False)
        requests, requests_given = socket.socketpair()
        self._sockets.append(requests)
        with requests_given:
            self._fork_server.judge(spec, verdicts_given, requests_given.fileno())
        self._close(spec, verdicts_given)
        self._spare = self._new_candidate()
        self._requests = requests
        self._on_read(requests.fileno(), lambda: self._candidate_wanted(requests))
        names = (
            *("setup", "tests", "marked", "stubs", "classes", "exceptions"),
            *("seconds", "run_all", "memory_mb"),
        )
        rest = {
            "first": len(told),
            "timeouts": told.count("timeout"),
            "max_timeouts": self._confinement.limits.max_timeouts,
        }
        self._send_spec(given, names, **rest, nonce=self._verdicts.nonce)

    def _replace_judge(self) -> None:
        """The judge is late: its test is over, another judge takes the tests after it."""
        assert self._requests is not None
        self._selector.unregister(self._requests)
        verdicts, seconds = self._verdicts.verdicts, float(self._job["seconds"])
        verdicts.append([len(verdicts), "timeout", "time limit exceeded", seconds])
        if len(verdicts) == len(self._job["tests"]) or not self._job["run_all"]:
            self._running, self._verdicts.complete, self._ended_judge = False, True, True
            return
        self._begin_judge()

    def _begin_program(self) -> None:
        spec, given = self._pipe()
        report, report_given = self._pipe()
        stdin = self._stdin_file()
        ends = (spec, report_given, stdin, self._stdout_given, self._stderr_given)
        self._fork_server.program(*ends)
        self._close(*ends)
        self._on_read(report, lambda: self._take_report(report))
        names = ("code", "prelude", "seconds", "memory_mb")
        rest = {"native": self._job.get("native"), "fetch": self._job.get("fetch", [])}
        self._send_spec(given, names, **rest, **self._place())

    def _new_candidate(self) -> socket.socket:
        """Our end of the line to a new candidate; what ran before is ended."""
        line, line_given = socket.socketpair()
        spec, given = self._pipe()
        with line_given:
            self._fork_server.candidate(
                spec, line_given.fileno(), self._stdout_given, self._stderr_given
            )
        self._close(spec)
        names = ("code", "prelude", "stubs", "shared_classes", "memory_mb", "problem_seconds")
        self._send_spec(given, names, **self._place())
        return line

    def _place(self) -> dict[str, Any]:
        return {"directory": self._directory, "files": self._job.get("files", {})}

    def _send_spec(self, fd: int, names: tuple[str, ...], **rest: Any) -> None:
        """Tell a new process those fields of the job that it may know, and ``rest``."""
        frames.send(fd, {**{name: self._job[name] for name in names}, **rest})
        self._close(fd)

    def _candidate_wanted(self, requests: socket.socket) -> None:
        """Give the judge a candidate; its end is the end of the job."""
        if requests.recv(1) != NEW_CANDIDATE:
            self._running = False
            return
        line, self._spare = self._spare or self._new_candidate(), None
        with line:
            socket.send_fds(requests, [b"candidate"], [line.fileno()])

    def _watch(self) -> None:
        # Without a tick nothing needs a look before something is to be read.
        ticks = self._judged or not self._confinement.isolated
        while self._running and self._stopped is None:
            left = self._deadline - time.monotonic()
            if left <= 0 and self._judged:
                self._look_at_verdicts()
                if self._deadline <= time.monotonic() and not self._verdicts.complete:
                    self._replace_judge()
                left = _TICK_SECONDS
            if left <= 0:
                self._stopped = "timeout"
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
        if self._judged:
            self._look_at_verdicts()
        limit = self._confinement.limits.disk_mb << 20
        if self._directory is not None and files.exceeds(self._directory, limit):
            self._stopped = "disk"

    def _look_at_verdicts(self) -> None:
        self._verdicts.read(self._verdicts_fd)
        if math.isfinite(self._verdicts.until):
            self._deadline = self._verdicts.until + _LATE_SECONDS

    def _pipe(self) -> tuple[int, int]:
        """Reading and writing end of a new pipe."""
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def _close(self, *ends: int) -> None:
        """Close ends that are not needed any more, unless they are closed already."""
        for fd in self._open.intersection(ends):
            self._open.remove(fd)
            os.close(fd)

    def _on_read(self, fd: int, action: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, action)

    def _service_speaks(self) -> None:
        """Nobody waits any more: the service cancels the job, or is gone."""
        try:
            frames.receive(self._control, limit=_JOB_BYTES)
        except frames.PeerGone as error:
            raise ServiceGone("the service closed the connection during a job") from error
        self._stopped = "cancelled"

    def _drain(self, fd: int, output: _CapturedOutput) -> None:
        data = os.read(fd, _CHUNK)
        if not data:
            self._selector.unregister(fd)
        output.add(data)
        if output.flooded:
            self._stopped = "output"

    def _stdin_file(self) -> int:
        """A file of the program's input that nobody can change: programs ask for its size, map it
        into memory, or read all of it in one call.
        """
        fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._open.add(fd)
        with open(fd, "wb", closefd=False) as file:
            file.write(base64.b64decode(self._job["stdin"]))
        os.lseek(fd, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd

    def _take_report(self, fd: int) -> None:
        """Take the report of init; its end is the end of the job."""
        try:
            report = frames.receive(fd, limit=_REPORT_BYTES)
        except frames.PeerGone:
            self._running = False
            return
        self._exit, self._files = report["exit"], report["files"]
        if self._files is None:
            self._stopped = self._stopped or "fetch"

    def _drain_rest(self) -> None:
        for fd, output in self._outputs.items():
            while not output.flooded and (data := os.read(fd, _CHUNK)):
                output.add(data)
            if output.flooded:
                self._stopped = self._stopped or "output"
        if self._judged:
            self._verdicts.read(self._verdicts_fd)

    def _report(self, statuses: dict[str, int], wall: float) -> dict[str, Any]:
        finished = self._exit is not None
        if self._judged:
            ended_well = self._ended_judge or statuses["judge"] == 0
            finished = self._verdicts.complete and ended_well
            self._exit = statuses.get("candidate")
        if not finished and self._stopped is None:
            return {"kind": "fault", "reason": f"the job broke off: {statuses}"}
        if self._directory is not None:
            self._files = files.fetch(self._directory, self._job.get("fetch", []))
            if self._files is None:
                self._stopped = self._stopped or "fetch"
        return {
            "kind": "end",
            "verdicts": self._verdicts.verdicts,
            "stopped": self._stopped,
            "exit": self._exit,
            "wall": wall,
            "stdout": self._stdout.report(),
            "stderr": self._stderr.report(),
            "files": self._files or {},
        }
