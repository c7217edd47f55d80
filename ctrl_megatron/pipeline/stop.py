"""Ctrl-C and SIGTERM as a request to stop at the next border between nodes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ctrl_megatron.parallel.groups import ProcessGroups

_SAME_REQUEST_SECONDS = 5.0
_REQUESTS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(Exception):
    """All ranks agreed to stop before the current step changed any weight."""


class StopFlag:
    """Remembers that a stop was asked for; a second request, seconds later, interrupts at once.

    The launcher repeats the terminal's Ctrl-C to every rank, so requests close together are one.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._previous: dict[int, Any] = {}

    def install(self) -> StopFlag:
        """Handle SIGINT and SIGTERM from now on (main thread only)."""
        for number in _REQUESTS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
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
        """True once this rank was asked to stop."""
        return self._first is not None

    def agreed(self, groups: ProcessGroups, local: bool = False) -> bool:
        """True on all ranks if any rank was asked to stop (or gives ``local``). Collective."""
        flag = torch.tensor([int(self.is_set or local)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=groups.host)
        return bool(flag.item())


@contextmanager
def requests_held() -> Iterator[None]:
    """Processes that are started in the block never see a request; this one sees it after the block
    at the latest (main thread only).

    Launchers send the signal to a rank's whole process group. Megatron's checkpoint writer starts
    helpers in the first save and keeps them; with one of them gone no later save succeeds, the one
    before the stop least of all.
    """
    # Whoever starts multiprocessing's tracker lets these signals through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
