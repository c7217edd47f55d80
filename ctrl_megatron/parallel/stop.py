"""A stop requested by Ctrl-C or SIGTERM, on which all ranks agree."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from ctrl_megatron.parallel.groups import ProcessGroups

_SAME_REQUEST_SECONDS = 5.0


class StopRequested(Exception):
    """All ranks agreed to stop before the current step changed any weight."""


class StopFlag:
    """Remembers that a stop was requested; a second request, seconds later, interrupts at once.

    The launcher repeats the terminal's Ctrl-C to every rank, so requests close together are one.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._previous: dict[int, Any] = {}

    def install(self) -> StopFlag:
        """Handle SIGINT and SIGTERM from now on (main thread only)."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def restore(self) -> None:
        """Restore the signals' former handlers."""
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
        """True once a stop was requested on this rank."""
        return self._first is not None

    def agreed(self, groups: ProcessGroups) -> bool:
        """True on all ranks if a stop was requested on any rank. Collective."""
        return groups.on_any(self.is_set)[0]
