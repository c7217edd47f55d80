"""Which file descriptors a process keeps."""

from __future__ import annotations

import os

_HIGHEST = 1 << 20


def close_all_but(standard: int, *kept: int) -> None:
    """Close every descriptor above ``standard`` that is not in ``kept``."""
    low = standard + 1
    for fd in sorted(set(kept)):
        if fd < low:
            continue
        # CPython's closerange of an empty range can close everything; never ask for one.
        if low < fd:
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, _HIGHEST)


def standard(stdin: int | None, stdout: int | None, stderr: int | None) -> None:
    """Put the given descriptors in the places 0, 1 and 2; None means ``/dev/null``."""
    null = os.open("/dev/null", os.O_RDWR)
    for place, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(null if fd is None else fd, place)
