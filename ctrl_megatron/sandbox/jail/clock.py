"""The time of one test in the judge: the processor time of test and program together, and the time
by the clock, which is longer.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from ctrl_megatron.sandbox.jail import linux
from ctrl_megatron.sandbox.jail.failures import CandidateCannotAnswer
from ctrl_megatron.sandbox.limits import CPU_TIME_OVER, WALL_TIME_OVER

_LEAST_SECONDS = 0.01
"""The shortest timer, except at the end by the clock."""
_AT_ONCE = 1e-6
"""0 would switch a timer off."""


class JudgeClock:
    """At the end of a test's time an alarm raises ``CandidateCannotAnswer`` in the main thread.
    ``program`` is the pid of the process whose time counts with the judge's own.

    ``announce`` is told by when the alarm goes off next (``time.monotonic``). An alarm that finds
    time left announces the next one, which a judge in a loop of C cannot do.
    """

    def __init__(
        self, seconds: float, wall_seconds: float, announce: Callable[[float], None]
    ) -> None:
        self._seconds, self._wall_seconds, self._announce = seconds, wall_seconds, announce
        self.program = 0
        self.deadline = self._began = 0.0
        """``deadline`` is the end by the clock, in seconds of ``time.monotonic``."""
        self._reading = False
        signal.signal(signal.SIGALRM, self._alarm)

    def begin_test(self) -> None:
        """Begin a test, without an alarm."""
        self.deadline = time.monotonic() + self._wall_seconds
        self._began = self._used()

    def arm_alarm(self) -> None:
        """Let the alarm go off when the test's remaining time is over."""
        self._reading = False
        left = self._left()
        self._announce(time.monotonic() + left)
        signal.setitimer(signal.ITIMER_REAL, left)

    def disarm_alarm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def arm_alarm_for_reading(self, seconds: float) -> None:
        """Let the alarm go off after ``seconds`` at most, until ``start`` is called."""
        self._reading = True
        signal.setitimer(signal.ITIMER_REAL, min(seconds, self._left()))

    @property
    def expired_limit(self) -> str:
        """Which time is over; empty if none is."""
        if self._used() - self._began >= self._seconds:
            return CPU_TIME_OVER
        return WALL_TIME_OVER if time.monotonic() >= self.deadline else ""

    def _used(self) -> float:
        program = linux.cpu_seconds(self.program) if self.program else 0.0
        return time.process_time() + program

    def _left(self) -> float:
        cpu = self._seconds - (self._used() - self._began)
        wall = self.deadline - time.monotonic()
        return max(min(max(cpu, _LEAST_SECONDS), wall), _AT_ONCE)

    def _alarm(self, _number: int, _frame: object) -> None:
        over = self.expired_limit
        if over or self._reading:
            raise CandidateCannotAnswer("timeout", over or WALL_TIME_OVER)
        self.arm_alarm()
