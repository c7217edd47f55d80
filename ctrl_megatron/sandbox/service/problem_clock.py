"""The time that a problem has on workers, over all its tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TICK = 1e-3
"""Seconds; less is nothing left."""


class ProblemClock:
    """A budget in seconds that is used up by the jobs of one problem while workers run them: two at
    a time use it twice as fast, and one that waits for a worker uses nothing.

    When it is over the jobs that run are stopped. Time in which a worker failed does not count.
    For one event loop.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._since = time.monotonic()
        self._stops: list[Callable[[], None]] = []
        """One for each job that runs."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def left(self) -> float:
        """Seconds, 0.0 once it is over."""
        self._settle()
        return 0.0 if self._left < _TICK else self._left

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        return not self.left

    def spend(self, seconds: float) -> None:
        """Count work that was done elsewhere."""
        self._left -= seconds

    @contextmanager
    def running(self, stop: Callable[[], None]) -> Iterator[None]:
        """A job runs; ``stop`` makes it end early. Raising means that its worker failed."""
        began = time.monotonic()
        self._settle()
        self._stops.append(stop)
        self._set_timer()
        try:
            yield
        except BaseException:
            self._left += time.monotonic() - began
            raise
        finally:
            self._settle()
            self._stops.remove(stop)
            self._set_timer()

    def _settle(self) -> None:
        now = time.monotonic()
        self._left -= len(self._stops) * (now - self._since)
        self._since = now

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stops:
            wait = self.left / len(self._stops)
            self._timer = asyncio.get_running_loop().call_later(wait, self._look)

    def _look(self) -> None:
        if not self.over:
            self._set_timer()
            return
        for stop in self._stops:
            stop()
