"""Length-prefixed JSON over a file descriptor: four bytes of length (big endian), then the text."""

from __future__ import annotations

import json
import os
import select
import struct
import time
from typing import Any

HEADER = struct.Struct(">I")
_CHUNK = 1 << 16
_SPEC_BYTES = 1 << 30
# json.dumps and json.loads create a new encoder or detect the encoding at every call.
_encoded = json.JSONEncoder(separators=(",", ":")).encode
_decoded = json.JSONDecoder().decode


class FrameError(Exception):
    """The peer sent a malformed frame, or one that is too large."""


class PeerGone(Exception):
    """The peer closed the connection."""


class DeadlinePassed(Exception):
    """The frame did not arrive by the deadline."""


def encode_frame(message: Any) -> bytes:
    body = _encoded(message).encode()
    return HEADER.pack(len(body)) + body


def send(fd: int, message: Any) -> None:
    """Write one frame to a blocking descriptor. Raises ``PeerGone``."""
    send_encoded(fd, encode_frame(message))


def send_encoded(fd: int, frame: bytes) -> None:
    """Write a frame that ``encode_frame`` returned. Raises ``PeerGone``."""
    data = memoryview(frame)
    try:
        while data:
            data = data[os.write(fd, data) :]
    except (BrokenPipeError, ConnectionResetError) as error:
        raise PeerGone from error


def split_frames(data: bytes) -> tuple[list[Any], bytes]:
    """The messages of the complete frames at the start of ``data``, and the remaining bytes."""
    messages, at = [], 0
    while at + HEADER.size <= len(data):
        end = at + HEADER.size + HEADER.unpack_from(data, at)[0]
        if end > len(data):
            break
        messages.append(_decoded(data[at + HEADER.size : end].decode()))
        at = end
    return messages, data[at:]


def receive(fd: int, *, limit: int) -> Any:
    """Read one frame of at most ``limit`` bytes from a peer that sends nothing more until it is
    answered. Raises ``PeerGone`` or ``FrameError``.
    """
    return FrameReader(fd, limit=limit).receive()


def receive_spec(fd: int) -> dict[str, Any]:
    """Read the specification that the supervisor sends to a new process of a job, and close the
    pipe.
    """
    spec = receive(fd, limit=_SPEC_BYTES)
    os.close(fd)
    return spec


class FrameReader:
    """Reads frames from a descriptor that only this object reads. One system call usually returns a
    whole frame.
    """

    def __init__(self, fd: int, *, limit: int) -> None:
        self._fd = fd
        self._limit = limit
        self._data = b""
        self.size = 0
        """Size of the last frame in bytes."""

    def receive(self, deadline: float | None = None) -> Any:
        """Read the next frame by ``deadline`` (``time.monotonic`` seconds). Raises ``PeerGone``,
        ``DeadlinePassed`` or ``FrameError``.
        """
        size = HEADER.unpack(self._take(HEADER.size, deadline))[0]
        if size > self._limit:
            raise FrameError(f"a frame of {size} bytes exceeds the limit of {self._limit}")
        self.size = size
        try:
            return _decoded(self._take(size, deadline).decode())
        except (ValueError, RecursionError) as error:
            raise FrameError(f"malformed frame: {type(error).__name__}") from error

    def _take(self, size: int, deadline: float | None) -> bytes:
        if len(self._data) < size:
            parts, have = [self._data], len(self._data)
            while have < size:
                parts.append(_read_some(self._fd, deadline))
                have += len(parts[-1])
            self._data = b"".join(parts)
        taken, self._data = self._data[:size], self._data[size:]
        return taken


def _read_some(fd: int, deadline: float | None) -> bytes:
    if deadline is not None:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            raise DeadlinePassed
    try:
        part = os.read(fd, _CHUNK)
    except ConnectionResetError as error:
        raise PeerGone from error
    if not part:
        raise PeerGone
    return part
