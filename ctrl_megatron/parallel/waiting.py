"""Waiting for work that takes minutes, as a generation does, without one long collective."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from ctrl_megatron.parallel.groups import ProcessGroups

T = TypeVar("T")
_ROUND_SECONDS = 1.0
"""Seconds of one round; far below any time limit of a collective."""


def wait_together(
    future: Future[T] | None,
    groups: ProcessGroups,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Return when no rank's ``future`` is running any more; collective over all ranks.

    Ranks without one wait for the others. In every round the ranks that still work report it, so
    no collective lasts longer than a round, however long the work takes. There is no time limit:
    ``FailureWatch`` notices work whose process has died or hangs.

    Returns True, on all ranks and within a round, once ``stop()`` is true on any rank; the futures
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
    """The result of this rank's ``work`` (None without any) when all ranks are done. Collective."""
    wait_together(work, groups)
    return None if work is None else work.result()
