"""What this process waits for at the moment, in words, for the signs of life in its log."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Awaited:
    """Work on ``count`` things, of which ``done`` are ready. 0 of ``count`` leaves the number out.

    Several threads may read it while one counts.
    """

    what: str
    count: int = 0
    unit: str = "rows"
    done: int = 0

    def __str__(self) -> str:
        if not self.count:
            return self.what
        part = f"{self.done} of " if self.done else ""
        return f"{self.what} on {part}{self.count} {self.unit}"


_open: list[Awaited] = []
_lock = threading.Lock()
_current: ContextVar[Awaited | None] = ContextVar("awaited", default=None)


@contextmanager
def awaited(what: str, count: int = 0, unit: str = "rows") -> Iterator[Awaited]:
    """The body waits for ``what``. Code that it calls, also in other threads and on other event
    loops, counts its progress with ``one_done``.
    """
    item = Awaited(what, count, unit)
    token = _current.set(item)
    with _lock:
        _open.append(item)
    try:
        yield item
    finally:
        with _lock:
            _open.remove(item)
        _current.reset(token)


def one_done() -> None:
    """Count one more finished thing of the innermost ``awaited`` around the caller, if any."""
    if (item := _current.get()) is not None:
        item.done += 1


def all_awaited() -> list[str]:
    """What the process waits for in detail, the oldest first."""
    with _lock:
        return [str(item) for item in _open]
