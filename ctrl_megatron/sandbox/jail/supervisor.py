"""One job: forks pid 1, hands out code and tests, drains output, keeps the clock, kills the tree,
reports.

The tests reach the judge through a pipe of its own, after the process from which candidates are
forked exists: a candidate's memory never held them. The verdicts come back on a pipe that no
candidate has, with a nonce.
"""

from __future__ import annotations

import base64
import os
import secrets
import selectors
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ctrl_megatron.sandbox.isolation import Confinement
from ctrl_megatron.sandbox.jail import disk, files, frames, init, linux, namespaces, reaper
from ctrl_megatron.sandbox.limits import SandboxLimits

_JOB_BYTES = 1 << 30
_INTERNAL_BYTES = 64 << 20
_GRACE_SECONDS = 2.0
_PHASES = 3
"""What a judge may do between two verdicts: load the program, run the setup, run a test."""
_CHUNK = 1 << 16
_TICK_SECONDS = 0.05
"""Between two looks at the verdicts, and at a directory that no file system bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What every job of a worker shares."""

    confinement: Confinement
    limits: SandboxLimits
    scratch: str
    """Directory for private directories where there are no mount namespaces."""

    @property
    def isolated(self) -> bool:
        """Whether jobs get namespaces."""
        return self.confinement.reached.tier == "namespaces"


def run(control: int, worker: Worker) -> None:
    """The job's private directory: a tmpfs, or a directory that is removed afterwards."""
    status = 1
    try:
        linux.die_with_parent()
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        with _Directory(worker) as directory:
            _Job(control, worker, directory).serve()
        status = 0
    except BaseException as error:
        sys.stderr.write(f"sandbox supervisor: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(status)


class _Directory:
    """The job's private directory: a tmpfs of its own, or a removed directory where there are no
    namespaces.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._path = namespaces.TMP

    def __enter__(self) -> str:
        if self._worker.isolated:
            reached = self._worker.confinement.reached
            namespaces.enter_job(self._worker.limits.disk_mb << 20, ipc=not reached.seccomp)
        else:
            self._path = tempfile.mkdtemp(dir=self._worker.scratch)
        os.chdir(self._path)
        return self._path

    def __exit__(self, *_: object) -> None:
        if not self._worker.isolated:
            os.chdir("/")
            disk.remove_tree(self._path)


class _Output:
    """One output stream of the program: keeps the first ``keep`` bytes, counts the rest."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._parts: list[bytes] = []
        self._kept = 0
        self.seen = 0

    def add(self, data: bytes) -> None:
        part = data[: self._keep - self._kept]
        self._parts.append(part)
        self._kept += len(part)
        self.seen += len(data)

    @property
    def flooded(self) -> bool:
        return self.seen > 4 * self._keep

    def report(self) -> dict[str, Any]:
        text = base64.b64encode(b"".join(self._parts)).decode()
        return {"bytes": text, "truncated": self.seen > self._kept}


class _Job:
    """State of the running job; ``stopped`` says why it was cut short, if it was."""

    def __init__(self, control: int, worker: Worker, directory: str) -> None:
        self._control = control
        self._worker = worker
        self._directory = directory
        self._nonce = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._stdout = _Output(worker.limits.output_bytes)
        self._stderr = _Output(worker.limits.output_bytes)
        self._stdin = memoryview(b"")
        self._stopped: str | None = None
        self._exit: int | None = None
        self._judge_exit: int | None = None
        self._done = False
        self._unattended = worker.isolated
        """Nothing needs a look before something is to be read."""
        self._running = True
        self._deadline = self._job_deadline = 0.0
        self._patience = self._ticked = 0.0
        self._unread = b""
        self._verdicts: list[dict[str, Any]] = []

    def serve(self) -> None:
        """Fork init, then read the job: so no memory that a child inherits holds the tests."""
        pipes = init.Pipes.create()
        pid = os.fork()
        if pid == 0:
            init.run(pipes.child_side(), self._worker, self._directory)
        pipes.close_child_side()
        job = frames.receive(self._control, limit=_JOB_BYTES)
        started = time.monotonic()
        try:
            self._start(job, pipes)
            self._watch(pipes)
        finally:
            reaper.end_tree(pid, isolated=self._worker.isolated)
        self._drain_rest(pipes)
        wall = time.monotonic() - started
        self._report(job, wall)

    def _start(self, job: dict[str, Any], pipes: init.Pipes) -> None:
        seconds = float(job["seconds"])
        now = time.monotonic()
        self._deadline = now + seconds
        self._job_deadline = now + max(self._worker.limits.job_seconds, seconds + _GRACE_SECONDS)
        files.write(self._directory, job.get("files", {}))
        candidate = {key: job[key] for key in ("kind", "code", "prelude", "seconds", "memory_mb")}
        frames.send(pipes.command, {**candidate, "native": job.get("native")})
        if job["kind"] == "asserts":
            # The judge keeps the clock of each test; ours only catches a judge that hangs in a
            # comparison.
            self._patience = _PHASES * seconds + _GRACE_SECONDS
            self._unattended = False
            os.set_blocking(pipes.verdicts, False)
            self._deadline = now + self._patience
            judge = {key: job[key] for key in ("setup", "tests", "stubs", "seconds", "run_all")}
            limits = self._worker.limits
            frames.send(
                pipes.judge_input,
                {**judge, "nonce": self._nonce, "max_timeouts": limits.max_timeouts},
            )
        else:
            self._stdin = memoryview(base64.b64decode(job["stdin"]))

    def _watch(self, pipes: init.Pipes) -> None:
        self._on_read(self._control, self._service_gone)
        self._on_read(pipes.stdout, lambda: self._drain(pipes.stdout, self._stdout))
        self._on_read(pipes.stderr, lambda: self._drain(pipes.stderr, self._stderr))
        self._on_read(pipes.report, lambda: self._child_report(pipes.report))
        os.set_blocking(pipes.stdin, False)
        self._selector.register(pipes.stdin, selectors.EVENT_WRITE, lambda: self._feed(pipes.stdin))
        while self._running and self._stopped is None:
            left = min(self._deadline, self._job_deadline) - time.monotonic()
            if left <= 0:
                self._stopped = "timeout" if self._deadline <= self._job_deadline else "job_timeout"
                break
            wait = left if self._unattended else min(left, _TICK_SECONDS)
            for key, _ in self._selector.select(wait):
                key.data()
            self._tick(pipes)

    def _tick(self, pipes: init.Pipes) -> None:
        """What is looked at now and then: a wake-up per verdict would cost more than the test."""
        now = time.monotonic()
        if self._unattended or now < self._ticked + _TICK_SECONDS:
            return
        self._ticked = now
        if self._patience and self._take_verdicts(pipes.verdicts):
            self._deadline = now + self._patience
        limit = self._worker.limits.disk_mb << 20
        if not self._worker.isolated and disk.exceeds(self._directory, limit):
            self._stopped = "disk"

    def _on_read(self, fd: int, action: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, action)

    def _service_gone(self) -> None:
        raise ConnectionError("the service closed the connection during a job")

    def _drain(self, fd: int, output: _Output) -> None:
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
            os.close(fd)

    def _child_report(self, fd: int) -> None:
        """Take one report of init; its end is the end of the job."""
        try:
            report = frames.receive(fd, limit=_INTERNAL_BYTES)
        except frames.PeerGone:
            self._running = False
            return
        self._exit = report.get("exit", self._exit)
        self._judge_exit = report.get("judge_exit", self._judge_exit)

    def _take_verdicts(self, fd: int) -> bool:
        """Take all verdicts that the judge has written so far; whether there were any."""
        before = len(self._verdicts)
        while True:
            try:
                data = os.read(fd, _CHUNK)
            except BlockingIOError:
                break
            if not data:
                break
            self._unread += data
        messages, self._unread = frames.split(self._unread)
        for message in messages:
            if message.pop("nonce") != self._nonce:
                raise frames.FrameError("a verdict without this job's nonce")
            if message["kind"] == "done":
                self._done = True
            else:
                self._verdicts.append(message)
        return len(self._verdicts) > before

    def _drain_rest(self, pipes: init.Pipes) -> None:
        for fd, output in ((pipes.stdout, self._stdout), (pipes.stderr, self._stderr)):
            while not output.flooded and (data := os.read(fd, _CHUNK)):
                output.add(data)
            if output.flooded:
                self._stopped = self._stopped or "output"
        self._take_verdicts(pipes.verdicts)
        while self._running:
            self._child_report(pipes.report)

    def _report(self, job: dict[str, Any], wall: float) -> None:
        finished = self._done and self._judge_exit == 0
        if job["kind"] == "program":
            finished = self._exit is not None
        if not finished and self._stopped is None:
            what = f"judge exit {self._judge_exit}" if job["kind"] == "asserts" else "init ended"
            frames.send(self._control, {"kind": "fault", "reason": f"the job broke off: {what}"})
            return
        end = {
            "kind": "end",
            "verdicts": self._verdicts,
            "stopped": self._stopped,
            "exit": self._exit,
            "wall": wall,
            "stdout": self._stdout.report(),
            "stderr": self._stderr.report(),
            "files": files.fetch(self._directory, job.get("fetch", [])),
        }
        frames.send(self._control, end)
