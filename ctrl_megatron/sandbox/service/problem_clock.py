"""The time budget of a problem on workers, for all its tests together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TICK = 1e-3
"""Seconds; a smaller rest counts as nothing."""


class ProblemClock:
    """A budget of ``seconds`` of processor time for the jobs of one problem, and of ``wall_factor``
    times as much by the clock while workers run them: two jobs at the same time use that twice as
    fast, and a job that waits for a worker uses nothing.

    When the time by the clock is over the running jobs are stopped; a job's processor time counts
    at its end. Time during which a worker failed does not count. For one event loop.
    """

    def __init__(self, seconds: float, wall_factor: float = 1.0) -> None:
        self._cpu_left = seconds
        self._left = seconds * wall_factor
        self._since = time.monotonic()
        self._stops: list[Callable[[], None]] = []
        """The stop function of each running job."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def seconds_left(self) -> float:
        """Remaining seconds of processor time, 0.0 at the end."""
        self._settle()
        left = min(self._left, self._cpu_left)
        return 0.0 if left < _TICK else left

    @property
    def is_over(self) -> bool:
        return not self.seconds_left

    def spend(self, seconds: float) -> None:
        self._cpu_left -= seconds

    @contextmanager
    def counting_time(self, stop: Callable[[], None]) -> Iterator[None]:
        """Count the time while a job runs; ``stop`` ends the job early. An exception in the block
        means that its worker failed.
        """
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
            wait = max(self._left, 0.0) / len(self._stops)
            self._timer = asyncio.get_running_loop().call_later(wait, self._look)

    def _look(self) -> None:
        self._settle()
        if self._left >= _TICK:
            self._set_timer()
            return
        for stop in self._stops:
            stop()
