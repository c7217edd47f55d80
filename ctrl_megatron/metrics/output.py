"""Standard output and error of a run, which goes on when nobody reads them any more."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

_NOT_READ = (errno.EPIPE, errno.EIO)
"""The reader closed the pipe, as ``| head`` does; the terminal was closed."""


def ignore_closed_output() -> None:
    """Let writes to standard output and error be discarded once nobody can read them.

    A full disk behind them raises the OSError with the name of the file.
    """
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _lasting(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _lasting(sys.stderr)


def discard_output(descriptor: int) -> None:
    """Let everything that is written to ``descriptor`` be lost from now on."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)


class _Lasting(io.FileIO):
    """A descriptor that stays open when the object is closed."""

    def write(self, data: Any, /) -> int:
        """``FileIO.write``; a reader that is gone is no error."""
        try:
            return super().write(data) or 0
        except OSError as error:
            file = os.readlink(f"/proc/self/fd/{self.fileno()}")
            # Also what the layers above have kept, which they would try to write again.
            discard_output(self.fileno())
            if error.errno not in _NOT_READ:
                raise OSError(error.errno, error.strerror, file) from error
            return len(memoryview(data).cast("B"))


def _lasting(stream: TextIO) -> TextIO:
    stream.flush()
    raw = _Lasting(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )
