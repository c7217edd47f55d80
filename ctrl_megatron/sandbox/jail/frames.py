"""Length-prefixed JSON over a file descriptor: four bytes of length (big endian), then the text."""

from __future__ import annotations

import json
import os
import select
import struct
import time
from typing import Any

HEADER = struct.Struct(">I")


class FrameError(Exception):
    """The other side sent something that is no frame, or more than it may."""


class PeerGone(Exception):
    """The other side closed its end."""


class DeadlinePassed(Exception):
    """The frame did not arrive in time."""


def encode(message: Any) -> bytes:
    """A message as one frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(body)) + body


def send(fd: int, message: Any) -> None:
    """Write one frame to a blocking descriptor. Raises ``PeerGone``."""
    data = memoryview(encode(message))
    try:
        while data:
            data = data[os.write(fd, data) :]
    except (BrokenPipeError, ConnectionResetError) as error:
        raise PeerGone from error


def receive(fd: int, *, limit: int, deadline: float | None = None) -> Any:
    """Read one frame of at most ``limit`` bytes, until ``deadline`` (``time.monotonic`` seconds).

    Never reads past the frame. Raises ``PeerGone``, ``DeadlinePassed`` or ``FrameError``.
    """
    (size,) = HEADER.unpack(_read(fd, HEADER.size, deadline))
    if size > limit:
        raise FrameError(f"a frame of {size} bytes exceeds the limit of {limit}")
    try:
        return json.loads(_read(fd, size, deadline))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"malformed frame: {type(error).__name__}") from error


def _read(fd: int, size: int, deadline: float | None) -> bytes:
    parts: list[bytes] = []
    while size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise DeadlinePassed
        try:
            part = os.read(fd, min(size, 1 << 16))
        except ConnectionResetError as error:
            raise PeerGone from error
        if not part:
            raise PeerGone
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
