"""A stop requested by Ctrl-C, SIGTERM or SIGHUP, on which all ranks agree."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ctrl_megatron.parallel.groups import RankSet

_SAME_REQUEST_SECONDS = 5.0
_MEETING_SECONDS = 5.0
"""Seconds that ranks have to meet after a stop is requested."""


class StopRequested(Exception):
    """All ranks agreed to stop before the current step changed any weight."""


class StopFlag:
    """Remembers that a stop was requested; a second request, seconds later, interrupts at once.

    The launcher repeats the terminal's Ctrl-C to every rank, so requests close together are one.
    """

    def __init__(self) -> None:
        self.deferred = False
        """Whether a request has no effect for now: something is under way that must not be left
        half-done. All ranks set it at the same place."""
        self._first: float | None = None
        self._previous: dict[int, Any] = {}

    def install(self) -> StopFlag:
        """Handle SIGINT, SIGTERM and, unless it is ignored as under nohup, SIGHUP from now on (main
        thread only).
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
        elif now - self._first > _SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt

    @property
    def is_set(self) -> bool:
        """True once a stop was requested on this rank, but not while it is ``deferred``."""
        return self._first is not None and not self.deferred

    def requested_on_any_rank(self, groups: RankSet) -> bool:
        """True on all ranks of ``groups`` if a stop was requested on any of them. Collective."""
        return groups.any_rank(self.is_set)[0]

    @contextmanager
    def end_on_stop(self, end: Callable[[], None]) -> Iterator[None]:
        """Call ``end`` in a thread if a stop is requested and the block still runs five seconds
        later (main thread only).

        The ranks meet in C++ code, during which Python runs no signal handler, and a rank that is
        missing keeps the others there. Python writes the number of a signal to the wake-up
        descriptor all the same.
        """
        receive, send = os.pipe()
        os.set_blocking(send, False)
        met = threading.Event()

        def watch() -> None:
            while (number := os.read(receive, 1)[0]) and number not in self._previous:
                pass
            if number and not met.wait(_MEETING_SECONDS):
                end()

        thread = threading.Thread(target=watch, name="meeting-watch", daemon=True)
        thread.start()
        before = signal.set_wakeup_fd(send, warn_on_full_buffer=False)
        try:
            if self.is_set:
                os.write(send, bytes([signal.SIGTERM]))
            yield
        finally:
            signal.set_wakeup_fd(before)
            met.set()
            os.write(send, b"\0")
            thread.join()
            os.close(receive)
            os.close(send)
