"""The supervisor's ends of a job's pipes: what programs print, what judges tell."""

from __future__ import annotations

import base64
import os
import socket
from typing import Any

from ctrl_megatron.sandbox.jail import frames
from ctrl_megatron.sandbox.jail.verdict import Verdict

_CHUNK = 1 << 16


class Descriptors:
    """The descriptors of one job; none outlives it."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._sockets: list[socket.socket] = []

    def pipe(self) -> tuple[int, int]:
        """Reading and writing end of a new pipe."""
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def keep(self, line: socket.socket) -> None:
        """Close ``line`` with the rest."""
        self._sockets.append(line)

    def close_one(self, fd: int) -> None:
        """Close an end that is not needed any more, unless it is closed already."""
        if fd in self._open:
            self._open.remove(fd)
            os.close(fd)

    def close(self) -> None:
        """Close what is left."""
        for fd in self._open:
            os.close(fd)
        self._open.clear()
        for line in self._sockets:
            line.close()


class Output:
    """One output stream of the program: keeps the first ``keep`` bytes, counts the rest."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._parts: list[bytes] = []
        self._kept = 0
        self.seen = 0

    def add(self, data: bytes) -> None:
        """Take what was read."""
        part = data[: self._keep - self._kept]
        self._parts.append(part)
        self._kept += len(part)
        self.seen += len(data)

    @property
    def flooded(self) -> bool:
        """Whether the program prints without end."""
        return self.seen > 4 * self._keep

    def report(self) -> dict[str, Any]:
        """For the service."""
        text = base64.b64encode(b"".join(self._parts)).decode()
        return {"bytes": text, "truncated": self.seen > self._kept}


class Verdicts:
    """What the judge has told so far, every word of it with this job's ``nonce``."""

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self.told: list[Verdict] = []
        self.done = False
        """The judge has told all."""
        self._unread = b""

    def take(self, fd: int) -> bool:
        """Read what is there on a descriptor that does not block; whether there were verdicts.

        Raises ``FrameError`` for a word without the nonce.
        """
        before = len(self.told)
        while True:
            try:
                data = os.read(fd, _CHUNK)
            except BlockingIOError:
                break
            if not data:
                break
            self._unread += data
        messages, self._unread = frames.split(self._unread)
        for nonce, *words in messages:
            if nonce != self.nonce:
                raise frames.FrameError("a verdict without this job's nonce")
            if words:
                self.told.append(Verdict(*words))
            else:
                self.done = True
        return len(self.told) > before
