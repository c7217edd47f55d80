"""Waiting for what takes minutes, as a generation does, without sitting in one collective."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from ctrl_megatron.parallel.groups import ProcessGroups

T = TypeVar("T")
_ROUND_SECONDS = 1.0
"""Far below any time limit of a collective."""


def wait_together(
    future: Future[T] | None,
    groups: ProcessGroups,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Return when no rank's ``future`` is running any more; collective over all ranks.

    Ranks without one wait for the others. In every round those that still work say so, so no
    collective lasts longer than a round however long the work does. Who no longer works, or died,
    is the business of whoever watches it: a future that never ends is waited for without end.

    Returns True, on all ranks and within a round, once ``stop()`` holds on any rank; the futures
    may still be running then. Raises at once, on its own rank, what a future raises.
    """
    while True:
        asked = stop()
        if future is not None and not asked:
            wait((future,), timeout=_ROUND_SECONDS)
        working = future is not None and not future.done()
        if future is not None and not working:
            future.result()
        stopped, busy = groups.on_any(asked, working)
        if stopped or not busy:
            return stopped


def result_of(work: Future[T] | None, groups: ProcessGroups) -> T | None:
    """The result of this rank's ``work``, if it has any, once all ranks' is done. Collective."""
    wait_together(work, groups)
    return None if work is None else work.result()
