"""Pid 1 of a job: a clean forker. It forks the judge and the candidates and never sees a test."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from ctrl_megatron.sandbox.jail import (
    candidate,
    connection,
    descriptors,
    frames,
    judge,
    linux,
    native,
    program,
)

if TYPE_CHECKING:
    from ctrl_megatron.sandbox.jail.supervisor import Worker

_SPEC_BYTES = 1 << 30
_JUDGE_SECONDS = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSide:
    """Descriptors of a job's processes."""

    command: int
    report: int
    stdin: int
    stdout: int
    stderr: int
    judge_input: int
    verdicts: int


@dataclass(slots=True, kw_only=True)
class Pipes:
    """Descriptors of the supervisor, and until ``close_child_side`` those of the other side."""

    command: int
    report: int
    stdin: int
    stdout: int
    stderr: int
    judge_input: int
    verdicts: int
    _child: ChildSide

    @classmethod
    def create(cls) -> Self:
        """Seven pipes, each with its direction."""
        writes = ("command", "stdin", "judge_input")
        own, child = {}, {}
        for field in fields(ChildSide):
            reader, writer = os.pipe()
            supervisor_writes = field.name in writes
            own[field.name] = writer if supervisor_writes else reader
            child[field.name] = reader if supervisor_writes else writer
        return cls(**own, _child=ChildSide(**child))

    def child_side(self) -> ChildSide:
        """The other ends, for the child; closes the supervisor's ends there."""
        for field in fields(ChildSide):
            os.close(getattr(self, field.name))
        return self._child

    def close_child_side(self) -> None:
        """Close the other ends in the supervisor."""
        for field in fields(ChildSide):
            os.close(getattr(self._child, field.name))


def run(pipes: ChildSide, worker: Worker, directory: str) -> None:
    """Serve one job; never returns. The supervisor's end of ``command`` closing ends everything."""
    try:
        linux.die_with_parent()
        linux.drop_capabilities()
        descriptors.close_all_but(2, *(getattr(pipes, field.name) for field in fields(pipes)))
        spec = frames.receive(pipes.command, limit=_SPEC_BYTES)
        job = _Forker(pipes, worker, directory, spec)
        if spec["kind"] == "asserts":
            job.serve_judge()
        else:
            job.run_program()
    finally:
        os._exit(0)


class _Forker:
    def __init__(
        self, pipes: ChildSide, worker: Worker, directory: str, spec: dict[str, Any]
    ) -> None:
        self._pipes = pipes
        self._worker = worker
        self._directory = directory
        self._spec = spec
        self._candidate = 0
        self._last_exit: int | None = None

    def run_program(self) -> None:
        """Fork the program, wait for it (reaping orphans meanwhile) and report its wait status."""
        os.close(self._pipes.judge_input)
        os.close(self._pipes.verdicts)
        self._candidate = self._fork(self._program)
        descriptors.close_all_but(2, self._pipes.command, self._pipes.report)
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == self._candidate:
                break
        frames.send(self._pipes.report, {"exit": status})

    def serve_judge(self) -> None:
        """Fork the judge, then a candidate whenever it asks for one, until the judge ends."""
        own, theirs = socket.socketpair()
        judge_pid = self._fork(lambda: self._judge(theirs))
        theirs.close()
        os.close(self._pipes.judge_input)
        os.close(self._pipes.verdicts)
        while self._asked(own):
            self._end_candidate()
            ours, remote = socket.socketpair()
            self._candidate = self._fork(lambda end=remote: self._functions(end))
            remote.close()
            socket.send_fds(own, [b"candidate"], [ours.fileno()])
            ours.close()
        self._end_candidate()
        status = os.waitpid(judge_pid, 0)[1]
        frames.send(self._pipes.report, {"judge_exit": status, "exit": self._last_exit})

    def _asked(self, judge_socket: socket.socket) -> bool:
        ready = select.select([judge_socket, self._pipes.command], [], [])[0]
        if self._pipes.command in ready:
            os._exit(0)
        return judge_socket.recv(1) == connection.NEW_CANDIDATE

    def _end_candidate(self) -> None:
        if not self._candidate:
            return
        os.kill(self._candidate, signal.SIGKILL)
        self._last_exit = os.waitpid(self._candidate, 0)[1]
        self._candidate = 0

    def _fork(self, body: Callable[[], None]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            linux.die_with_parent()
            body()
        finally:
            os._exit(1)

    def _judge(self, end: socket.socket) -> None:
        descriptors.standard(None, None, None)
        descriptors.close_all_but(2, end.fileno(), self._pipes.judge_input, self._pipes.verdicts)
        self._confine(_JUDGE_SECONDS)
        judge.run(end, self._pipes.judge_input, self._pipes.verdicts)

    def _functions(self, end: socket.socket) -> None:
        descriptors.standard(None, self._pipes.stdout, self._pipes.stderr)
        descriptors.close_all_but(2, end.fileno())
        self._confine(self._worker.limits.job_seconds)
        candidate.run(end.fileno(), self._spec["prelude"], self._spec["code"])

    def _program(self) -> None:
        descriptors.standard(self._pipes.stdin, self._pipes.stdout, self._pipes.stderr)
        descriptors.close_all_but(2)
        wanted = self._spec.get("native")
        self._confine(self._spec["seconds"], profile=wanted["profile"] if wanted else None)
        if wanted:
            native.run(self._directory, wanted["profile"], wanted["command"])
        program.run(self._directory, self._spec["code"], self._spec["prelude"])

    def _confine(self, cpu_seconds: float, profile: str | None = None) -> None:
        limits = self._worker.limits
        self._worker.confinement.apply(
            self._directory,
            memory_bytes=self._spec["memory_mb"] << 20,
            cpu_seconds=cpu_seconds,
            profile=profile,
            file_bytes=limits.file_bytes,
            open_files=limits.open_files,
            processes=limits.processes,
        )
