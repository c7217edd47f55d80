"""Forks the processes of a worker's jobs and ends them. It never sees a job: what is in its memory
is in every candidate's, so specifications go past it, through pipes that its children read.

In a worker with namespaces it is the first process of the worker's pid namespace, and a candidate
the first of one of its own: with it ends everything it started.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import NoReturn

from ctrl_megatron.sandbox.jail import (
    candidate,
    descriptors,
    init,
    judge,
    linux,
    namespaces,
    reaper,
)
from ctrl_megatron.sandbox.jail.worker import Worker, read_spec

_JUDGE_SECONDS = 3600
_ANSWER_BYTES = 1 << 12
_MOST_DESCRIPTORS = 8
_JUDGE, _CANDIDATE, _PROGRAM, _END = b"J", b"C", b"P", b"E"


class Forker:
    """The supervisor's side; a lost forker raises ``ConnectionError``."""

    def __init__(self, line: socket.socket, pid: int) -> None:
        self._line = line
        self._pid = pid

    def close(self) -> None:
        """Let the forker end, and with it everything it started; returns when it has."""
        self._line.close()
        os.waitpid(self._pid, 0)

    def fileno(self) -> int:
        """Readable, while no answer is awaited, only when the forker has ended."""
        return self._line.fileno()

    def judge(self, spec: int, verdicts: int, asks: int) -> None:
        """Start the job's judge: it reads its specification and asks for candidates."""
        socket.send_fds(self._line, [_JUDGE], [spec, verdicts, asks])

    def candidate(self, spec: int, calls: int, stdout: int, stderr: int) -> None:
        """Start a candidate in place of the one before it, if there was one."""
        socket.send_fds(self._line, [_CANDIDATE], [spec, calls, stdout, stderr])

    def program(self, spec: int, report: int, stdin: int, stdout: int, stderr: int) -> None:
        """Start an init and its program."""
        socket.send_fds(self._line, [_PROGRAM], [spec, report, stdin, stdout, stderr])

    def end(self) -> dict[str, int]:
        """Kill what is left of the job; role -> wait status of what it started."""
        self._line.send(_END)
        answer = self._line.recv(_ANSWER_BYTES)
        if not answer:
            raise ConnectionError("the forker of the worker ended")
        return json.loads(answer)


def run(line: socket.socket, worker: Worker, own_pids: int | None) -> NoReturn:
    """Serve a ``Forker`` until it is gone. ``own_pids``: descriptor of this process's pid
    namespace, where candidates get one of their own.
    """
    status = 1
    try:
        linux.die_with_parent()
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        _Service(line, worker, own_pids).serve()
        status = 0
    finally:
        os._exit(status)


class _Service:
    def __init__(self, line: socket.socket, worker: Worker, own_pids: int | None) -> None:
        self._line = line
        self._worker = worker
        self._own_pids = own_pids
        self._running: dict[str, int] = {}

    def serve(self) -> None:
        start = {_JUDGE: self._judge, _CANDIDATE: self._candidate, _PROGRAM: self._program}
        while True:
            kind, fds, _, _ = socket.recv_fds(self._line, 1, _MOST_DESCRIPTORS)
            if not kind:
                reaper.end_all(self._running, isolated=self._worker.isolated)
                return
            if kind == _END:
                statuses = reaper.end_all(self._running, isolated=self._worker.isolated)
                self._running.clear()
                self._line.send(json.dumps(statuses).encode())
            else:
                start[kind](fds)
            for fd in fds:
                os.close(fd)

    def _judge(self, fds: Sequence[int]) -> None:
        self._running["judge"] = self._fork(lambda: _run_judge(self._worker, *fds))

    def _candidate(self, fds: Sequence[int]) -> None:
        before = self._running.pop("candidate", None)
        if before is not None:
            os.kill(before, signal.SIGKILL)
            os.waitpid(before, 0)
        self._running["candidate"] = self._fork_first(lambda: _run_candidate(self._worker, *fds))

    def _program(self, fds: Sequence[int]) -> None:
        self._running["init"] = self._fork_first(lambda: init.run(self._worker, *fds))

    def _fork_first(self, body: Callable[[], object]) -> int:
        own = self._own_pids
        return self._fork(body, os.fork if own is None else lambda: namespaces.fork_first(own))

    def _fork(self, body: Callable[[], object], fork: Callable[[], int] = os.fork) -> int:
        pid = fork()
        if pid:
            return pid
        try:
            linux.die_with_parent()
            body()
        finally:
            os._exit(1)


def _run_judge(worker: Worker, spec: int, verdicts: int, asks: int) -> None:
    descriptors.standard(None, None, None)
    descriptors.close_all_but(2, spec, verdicts, asks)
    linux.drop_capabilities()
    told = read_spec(spec)
    worker.confine(None, memory_mb=told["memory_mb"], cpu_seconds=_JUDGE_SECONDS)
    judge.run(socket.socket(fileno=asks), verdicts, told)


def _run_candidate(worker: Worker, spec: int, calls: int, stdout: int, stderr: int) -> None:
    descriptors.standard(None, stdout, stderr)
    descriptors.close_all_but(2, spec, calls)
    told = read_spec(spec)
    directory = worker.settle(told)
    seconds = worker.limits.job_seconds
    worker.confine(directory, memory_mb=told["memory_mb"], cpu_seconds=seconds)
    candidate.run(calls, told["prelude"], told["code"])
