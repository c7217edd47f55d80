"""An event loop whose waits take no time, for what is decided by timers alone: a busy machine makes
real ones late.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _NoWait(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


def run_without_waiting(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """``asyncio.run(scenario())`` on a loop whose ``time()`` begins at 0.0 and moves on to the next
    timer whenever there is nothing else to do."""
    selector = _NoWait()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()
