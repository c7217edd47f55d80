"""A worker's job, its report, and the output and verdicts that are collected for the report."""

from __future__ import annotations

import base64
import math
import os
from typing import Any, TypedDict

from ctrl_megatron.sandbox.jail import frames

_CHUNK = 1 << 16

_VERDICT_PARTS = 5
_COUNT_PARTS = 2
Job = dict[str, Any]
"""A job for a worker. ``kind`` is ``program`` (with ``stdin``, ``files``, ``fetch`` and optionally
``native`` and ``output_bytes``) or ``asserts`` (with ``setup``, ``tests``, ``uncounted``,
``stubs``, ``modules``, ``classes``, ``run_all``, ``problem_seconds``); both have ``code``,
``prelude``, ``memory_mb``, ``seconds`` (of processor time) and ``wall_seconds``."""


class JobReport(TypedDict):
    """A worker's answer to a job that it could run."""

    kind: str
    """``end``. A worker that failed answers ``fault`` with a ``reason``."""
    verdicts: list[list[Any]]
    """For ``asserts``: index, status, reason, seconds and text of each test that was run."""
    tests: int
    """Number of tests, as far as the judge has found them; -1 if each text is one."""
    stopped: str | None
    """Why the job was cut short: ``cpu`` (processor time), ``timeout`` (by the clock), ``output``,
    ``disk``, ``fetch``, ``cancelled``. The service adds ``job_timeout`` if it cancelled the job at
    the end of the problem's time, and ``broke`` for a program that brought down its workers."""
    exit: int | None
    """Wait status of the program, as ``os.waitpid`` returns it."""
    wall: float
    """Seconds of wall clock."""
    cpu: float
    """Seconds of processor time of all its processes."""
    stdout: dict[str, Any]
    """``bytes`` in base64, and whether they are ``truncated``. ``stderr`` has the same form."""
    stderr: dict[str, Any]
    files: dict[str, str]
    """Content of each fetched file in base64, by path."""


class LimitedOutput:
    """One output stream of the program: keeps the first ``keep`` bytes and counts the rest."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept = bytearray()
        self._seen = 0

    def add(self, data: bytes) -> None:
        self._kept += data[: self._keep - len(self._kept)]
        self._seen += len(data)

    @property
    def flooded(self) -> bool:
        """Whether the program wrote far more than is kept."""
        return self._seen > 4 * self._keep

    def report(self) -> dict[str, Any]:
        """The kept bytes in base64, and whether they are all."""
        text = base64.b64encode(self._kept).decode()
        return {"bytes": text, "truncated": self._seen > len(self._kept)}


class VerdictPipe:
    """The supervisor's end of the pipe on which the judge sends verdicts; a frame without this
    job's ``nonce`` is refused."""

    def __init__(self) -> None:
        self.nonce = os.urandom(16).hex()
        self.verdicts: list[list[Any]] = []
        self.tests = -1
        """Number of tests that the judge has found, -1 if each text is one."""
        self.complete = False
        """The judge has sent its last frame."""
        self.until = math.inf
        """Deadline of the judge's current step (``time.monotonic`` seconds)."""
        self._unread = b""

    def reset(self) -> None:
        """Prepare for a new judge; an incomplete frame of the last one is dropped."""
        self._unread, self.until = b"", math.inf

    def read(self, fd: int) -> None:
        """Read the available frames from a non-blocking descriptor.

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
        messages, self._unread = frames.split_frames(self._unread)
        for nonce, *verdict in messages:
            if nonce != self.nonce:
                raise frames.FrameError("a verdict without this job's nonce")
            if not verdict:
                self.complete = True
            if len(verdict) == _COUNT_PARTS:
                self.tests = verdict[1]
                continue
            if len(verdict) in (1, 1 + _VERDICT_PARTS):
                self.until = verdict.pop()
            if verdict:
                self.verdicts.append(verdict)
