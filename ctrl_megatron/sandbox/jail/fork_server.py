"""Forks the processes of a worker's jobs and ends them. It never sees a job, because its memory is
copied to every candidate: specifications go through pipes that only its children read.

In a worker with namespaces it is the first process of the worker's pid namespace, and a candidate
is the first process of its own, so that all processes of a candidate end with it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from ctrl_megatron.sandbox.jail import frames, linux, namespaces
from ctrl_megatron.sandbox.jail.candidate import serve_calls
from ctrl_megatron.sandbox.jail.isolation import Confinement
from ctrl_megatron.sandbox.jail.judge import run_tests
from ctrl_megatron.sandbox.jail.program import run_init

_JUDGE_SECONDS = 3600
_ANSWER_BYTES = 1 << 12
_MOST_DESCRIPTORS = 8
_JUDGE, _CANDIDATE, _PROGRAM, _END = b"J", b"C", b"P", b"E"


@dataclass(frozen=True, slots=True)
class ForkServer:
    """The supervisor's handle of its fork server. Raises ``ConnectionError`` if the fork server has
    ended.
    """

    _line: socket.socket
    _pid: int

    def close(self) -> None:
        """End the fork server and everything it started; returns when it has ended."""
        self._line.close()
        os.waitpid(self._pid, 0)

    def fileno(self) -> int:
        """The socket's descriptor. Unless an answer is awaited it becomes readable only when the
        fork server ends.
        """
        return self._line.fileno()

    def start_judge(self, spec: int, verdicts: int, requests: int) -> None:
        """Start the job's judge; an earlier judge is ended first. It reads its specification and
        requests candidates.
        """
        socket.send_fds(self._line, [_JUDGE], [spec, verdicts, requests])

    def start_candidate(self, spec: int, calls: int, stdout: int, stderr: int) -> None:
        """Start a candidate; an earlier candidate is ended first. ``candidate_pid`` returns its
        pid.
        """
        socket.send_fds(self._line, [_CANDIDATE], [spec, calls, stdout, stderr])

    def candidate_pid(self) -> int:
        """The pid, as the judge sees it, of a candidate; one answer for each, in their order."""
        return int(self._received())

    def start_program(self, spec: int, report: int, stdin: int, stdout: int, stderr: int) -> None:
        socket.send_fds(self._line, [_PROGRAM], [spec, report, stdin, stdout, stderr])

    def end_job(self) -> tuple[dict[str, int], float]:
        """Kill the remaining processes of the job. Returns their wait statuses by role, and the
        seconds of processor time that all its processes have used.
        """
        self._line.send(_END)
        while (answer := self._received()).isdigit():
            pass  # the pid of a candidate that nobody asked for
        statuses, seconds = json.loads(answer)
        return statuses, seconds

    def _received(self) -> bytes:
        answer = self._line.recv(_ANSWER_BYTES)
        if not answer:
            raise ConnectionError("the fork server of the worker ended")
        return answer


def serve_forks(line: socket.socket, confinement: Confinement, own_pids: int | None) -> NoReturn:
    """Serve a ``ForkServer`` until it is closed. ``own_pids`` is a descriptor of this process's pid
    namespace, or None where candidates get no pid namespace.
    """
    status = 1
    try:
        linux.die_with_parent()
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        _ForkServerProcess(line, confinement, own_pids).serve()
        status = 0
    finally:
        os._exit(status)


@dataclass(frozen=True, slots=True)
class _ForkServerProcess:
    _line: socket.socket
    _confinement: Confinement
    _own_pids: int | None
    _running: dict[str, int] = field(default_factory=dict)
    """Pid of each running role."""
    _used: list[float] = field(default_factory=list)
    """Seconds of processor time of each process of the job that has ended."""

    def serve(self) -> None:
        while True:
            kind, fds, _, _ = socket.recv_fds(self._line, 1, _MOST_DESCRIPTORS)
            if not kind:
                self._end_all()
                return
            if kind == _END:
                statuses = self._end_all()
                self._confinement.end_sharing()
                self._line.send(json.dumps([statuses, sum(self._used)]).encode())
                self._used.clear()
            elif kind == _JUDGE:
                self._end_one("judge")
                self._end_one("candidate")
                self._confinement.share_directory()
                self._start("judge", _run_judge, fds, os.fork)
            elif kind == _CANDIDATE:
                self._end_one("candidate")
                self._start("candidate", _run_candidate, fds, self._fork_first)
                self._line.send(str(self._running["candidate"]).encode())
            else:  # _PROGRAM
                self._start("init", run_init, fds, self._fork_first)
            for fd in fds:
                os.close(fd)

    def _fork_first(self) -> int:
        return (
            os.fork()
            if self._own_pids is None
            else namespaces.fork_into_pid_namespace(self._own_pids)
        )

    def _start(
        self, role: str, body: Callable[..., object], fds: Sequence[int], fork: Callable[[], int]
    ) -> None:
        pid = fork()
        if pid:
            self._running[role] = pid
            return
        try:
            linux.die_with_parent()
            body(self._confinement, *fds)
        finally:
            os._exit(1)

    def _end_one(self, role: str) -> None:
        pid = self._running.pop(role, None)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            self._reap(pid)

    def _reap(self, pid: int) -> tuple[int, int]:
        """Wait for a process (-1: any). Returns its pid and wait status."""
        pid, status, used = os.wait4(pid, 0)
        self._used.append(used.ru_utime + used.ru_stime)
        return pid, status

    def _end_all(self) -> dict[str, int]:
        """Kill everything that was started, with its descendants, and wait until nothing is left.
        Returns the wait status of each role.

        With a pid namespace the kernel ends all processes of a candidate together with it. Without
        one, orphans become children of this process (a subreaper) and are killed until there are
        none.
        """
        roles = {pid: role for role, pid in self._running.items()}
        self._running.clear()
        statuses: dict[str, int] = {}
        for pid in roles:
            _kill(pid)
        if self._confinement.isolated:
            return {role: self._reap(pid)[1] for pid, role in roles.items()}
        while True:
            for child in _children():
                _kill(child)
            try:
                pid, status = self._reap(-1)
            except ChildProcessError:
                return statuses
            if pid in roles:
                statuses[roles[pid]] = status


def _run_judge(confinement: Confinement, spec: int, verdicts: int, requests: int) -> None:
    linux.set_standard_streams(None, None, None)
    linux.close_all_but(2, spec, verdicts, requests)
    linux.drop_capabilities()
    job = frames.receive_spec(spec)
    directory = namespaces.TMP if confinement.isolated else job["directory"]
    confinement.confine(directory, memory_mb=job["memory_mb"], cpu_seconds=_JUDGE_SECONDS)
    run_tests(socket.socket(fileno=requests), verdicts, job, directory)


def _run_candidate(
    confinement: Confinement, spec: int, calls: int, stdout: int, stderr: int
) -> None:
    linux.set_standard_streams(None, stdout, stderr)
    linux.close_all_but(2, spec, calls)
    job = frames.receive_spec(spec)
    directory = confinement.enter_job_directory(job, shared=True)
    seconds, memory = job["problem_seconds"], job["memory_mb"]
    confinement.confine(directory, memory_mb=memory, cpu_seconds=seconds)
    serve_calls(calls, job["prelude"], job["code"], job["stubs"], job["classes"])


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _children() -> list[int]:
    own = os.getpid()
    children = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stream:
                parent = int(stream.read().rpartition(")")[2].split()[1])
        except OSError:
            continue  # the process has ended meanwhile
        if parent == own:
            children.append(int(name))
    return children
