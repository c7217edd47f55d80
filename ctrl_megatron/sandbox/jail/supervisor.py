"""The supervisor of a worker: reads jobs one after another, distributes code and tests to the
processes of a job, collects output, enforces time limits and reports.

Its memory contains tests and expected values, so it forks no process. The fork server forks, whose
memory never contained them. Verdicts return on a pipe that no candidate has, with a nonce.
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
from typing import Any, NoReturn

from ctrl_megatron.sandbox.jail import files, frames
from ctrl_megatron.sandbox.jail.fork_server import ForkServer
from ctrl_megatron.sandbox.jail.isolation import Confinement
from ctrl_megatron.sandbox.jail.job import Job, LimitedOutput, VerdictPipe
from ctrl_megatron.sandbox.jail.trust import NEW_CANDIDATE
from ctrl_megatron.sandbox.limits import WALL_TIME_OVER

_JOB_BYTES = 1 << 30
_REPORT_BYTES = 64 << 20
_GRACE_SECONDS = 2.0
_CPU_TICK = 1e-3
"""Seconds by which the kernel's sums of processor time may differ."""
_LATE_SECONDS = 0.5
"""Seconds after an announced deadline at which the judge is ended. A judge that runs Python code
ends the test itself, or announces another deadline."""
_CANCEL = None
"""The message with which the service cancels the running job."""
_CHUNK = 1 << 16
_TICK_SECONDS = 0.05
"""Interval between two checks of the verdicts, and of a directory without a quota."""


class ServiceGone(Exception):
    """The service closed the connection during a job."""


def serve_jobs(control: int, fork_server: ForkServer, confinement: Confinement) -> NoReturn:
    """Run the jobs that arrive on the socket ``control`` until the service closes it."""
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
    """A private directory for a job that has no file system of its own; removed afterwards."""
    if confinement.isolated:
        yield None
        return
    path = os.path.join(confinement.scratch, os.urandom(8).hex())
    os.mkdir(path, 0o700)
    try:
        yield path
    finally:
        files.remove_tree(path)


class _JobRun:
    """The running job. ``_stopped`` is the reason why it was cut short, if it was."""

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
        """Open descriptors of this job; all are closed at its end."""
        self._sockets: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        limit = confinement.limits.output_bytes
        self._stdout = LimitedOutput(job.get("output_bytes", limit))
        self._stderr = LimitedOutput(limit)
        self._verdicts = VerdictPipe()
        self._files: dict[str, str] | None = {}
        self._stopped: str | None = None
        self._exit: int | None = None
        self._running = True
        self._spare: socket.socket | None = None
        """The connection to a candidate that the judge has not requested yet."""
        self._pids_owed = 0
        """Candidates whose pid the fork server has sent or will send."""
        self._requests: socket.socket | None = None
        """The socket on which the judge requests candidates."""
        self._ended_judge = False
        """The judge was killed at its last test."""
        self._deadline = self._ticked = 0.0

    def run(self) -> dict[str, Any]:
        started = time.monotonic()
        try:
            try:
                self._begin(started)
                self._watch()
            finally:
                statuses, cpu = self._fork_server.end_job()
            self._close(self._stdout_given, self._stderr_given)
            self._drain_rest()
            return self._report(statuses, time.monotonic() - started, cpu)
        finally:
            self._selector.close()
            self._close(*self._open)
            for line in filter(None, (*self._sockets, self._spare)):
                line.close()

    def _begin(self, now: float) -> None:
        self._deadline = now + float(self._job["wall_seconds"])
        self._on_read(self._control, self._service_speaks)
        stdout, self._stdout_given = self._pipe()
        stderr, self._stderr_given = self._pipe()
        self._outputs = {stdout: self._stdout, stderr: self._stderr}
        for fd, output in self._outputs.items():
            self._on_read(fd, lambda fd=fd, output=output: self._drain(fd, output))
        if self._judged:
            # The judge limits the time of each test; the supervisor only ends a judge that hangs in
            # C code.
            self._begin_judge()
        else:
            self._begin_program()

    def _begin_judge(self) -> None:
        self._deadline = time.monotonic() + float(self._job["wall_seconds"]) + _GRACE_SECONDS
        self._verdicts.reset()
        statuses = [verdict[1] for verdict in self._verdicts.verdicts]
        spec, given = self._pipe()
        self._verdicts_fd, verdicts_given = self._pipe()
        os.set_blocking(self._verdicts_fd, False)
        requests, requests_given = socket.socketpair()
        self._sockets.append(requests)
        with requests_given:
            self._fork_server.start_judge(spec, verdicts_given, requests_given.fileno())
        self._close(spec, verdicts_given)
        self._spare = self._new_candidate()
        self._requests = requests
        self._on_read(requests.fileno(), lambda: self._candidate_wanted(requests))
        names = (
            *("setup", "tests", "uncounted", "stubs", "modules", "code"),
            *("seconds", "wall_seconds", "run_all", "memory_mb"),
        )
        rest = {
            "first": len(statuses),
            "timeouts": statuses.count("timeout"),
            "max_timeouts": self._confinement.limits.max_timeouts,
        }
        self._send_spec(given, names, **rest, nonce=self._verdicts.nonce, directory=self._directory)

    def _replace_judge(self) -> None:
        """Time out the current test of a late judge, and start another judge for the tests after
        it.
        """
        assert self._requests is not None
        self._selector.unregister(self._requests)
        verdicts, seconds = self._verdicts.verdicts, float(self._job["wall_seconds"])
        verdicts.append([len(verdicts), "timeout", WALL_TIME_OVER, seconds, ""])
        texts = len(self._job["tests"]) - len(self._job["uncounted"])
        counted = texts if self._verdicts.tests < 0 else self._verdicts.tests
        if len(verdicts) >= counted or not self._job["run_all"]:
            self._running, self._verdicts.complete, self._ended_judge = False, True, True
            return
        self._begin_judge()

    def _begin_program(self) -> None:
        spec, given = self._pipe()
        report, report_given = self._pipe()
        stdin = self._stdin_file()
        ends = (spec, report_given, stdin, self._stdout_given, self._stderr_given)
        self._fork_server.start_program(*ends)
        self._close(*ends)
        self._on_read(report, lambda: self._take_report(report))
        names = ("code", "prelude", "seconds", "memory_mb")
        rest = {"native": self._job.get("native"), "fetch": self._job.get("fetch", [])}
        self._send_spec(given, names, **rest, **self._place())

    def _new_candidate(self) -> socket.socket:
        """Start a new candidate in place of the last one; returns the supervisor's end of its
        connection.
        """
        line, line_given = socket.socketpair()
        spec, given = self._pipe()
        with line_given:
            self._fork_server.start_candidate(
                spec, line_given.fileno(), self._stdout_given, self._stderr_given
            )
        self._pids_owed += 1
        self._close(spec)
        names = ("code", "prelude", "stubs", "classes", "memory_mb", "problem_seconds")
        self._send_spec(given, names, **self._place())
        return line

    def _place(self) -> dict[str, Any]:
        return {"directory": self._directory, "files": self._job.get("files", {})}

    def _send_spec(self, fd: int, names: tuple[str, ...], **rest: Any) -> None:
        """Send a new process the fields ``names`` of the job, and ``rest``."""
        frames.send(fd, {**{name: self._job[name] for name in names}, **rest})
        self._close(fd)

    def _candidate_wanted(self, requests: socket.socket) -> None:
        """Send the judge a candidate. The end of the judge is the end of the job."""
        if requests.recv(1) != NEW_CANDIDATE:
            self._running = False
            return
        line, self._spare = self._spare or self._new_candidate(), None
        pid = 0
        while self._pids_owed:
            # The last one is the newest candidate's.
            pid, self._pids_owed = self._fork_server.candidate_pid(), self._pids_owed - 1
        with line:
            socket.send_fds(requests, [str(pid).encode()], [line.fileno()])

    def _watch(self) -> None:
        # Without ticks nothing has to be checked until a descriptor is readable.
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
        """Periodic checks: waking up for every verdict would cost more than the test."""
        now = time.monotonic()
        if now < self._ticked + _TICK_SECONDS:
            return
        self._ticked = now
        if self._judged:
            self._look_at_verdicts()
        limit = self._confinement.limits.disk_mb << 20
        if self._directory is not None and files.directory_exceeds(self._directory, limit):
            self._stopped = "disk"

    def _look_at_verdicts(self) -> None:
        self._verdicts.read(self._verdicts_fd)
        if math.isfinite(self._verdicts.until):
            self._deadline = self._verdicts.until + _LATE_SECONDS

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def _close(self, *ends: int) -> None:
        for fd in self._open.intersection(ends):
            self._open.remove(fd)
            os.close(fd)

    def _on_read(self, fd: int, action: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, action)

    def _service_speaks(self) -> None:
        """The service cancels the job, or is gone."""
        try:
            frames.receive(self._control, limit=_JOB_BYTES)
        except frames.PeerGone as error:
            raise ServiceGone("the service closed the connection during a job") from error
        self._stopped = "cancelled"

    def _drain(self, fd: int, output: LimitedOutput) -> None:
        data = os.read(fd, _CHUNK)
        if not data:
            self._selector.unregister(fd)
        output.add(data)
        if output.flooded:
            self._stopped = "output"

    def _stdin_file(self) -> int:
        """A file in memory with the program's input that cannot be changed. A file, because
        programs ask for its size, map it or read it in one call.
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
        """Read the report of the init process. The end of that process is the end of the job."""
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

    def _report(self, statuses: dict[str, int], wall: float, cpu: float) -> dict[str, Any]:
        finished = self._exit is not None
        late = cpu > float(self._job["seconds"]) - _CPU_TICK and not self._judged
        if late and self._stopped in (None, "timeout"):
            self._stopped = "cpu"
        if self._judged:
            ended_well = self._ended_judge or statuses["judge"] == 0
            finished = self._verdicts.complete and ended_well
            self._exit = statuses.get("candidate")
        if not finished and self._stopped is None:
            return {"kind": "fault", "reason": f"the job broke off: {statuses}"}
        if self._directory is not None:
            self._files = files.read_files_as_base64(self._directory, self._job.get("fetch", []))
            if self._files is None:
                self._stopped = self._stopped or "fetch"
        return {
            "kind": "end",
            "verdicts": self._verdicts.verdicts,
            "tests": self._verdicts.tests,
            "stopped": self._stopped,
            "exit": self._exit,
            "wall": wall,
            "cpu": cpu,
            "stdout": self._stdout.report(),
            "stderr": self._stderr.report(),
            "files": self._files or {},
        }
