"""An event loop in its own thread, for work that runs while the main thread computes."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Runs from the start of the trainer, so that a submitted coroutine begins at once.

    A task on a loop that is not running does not start. In the published CTRL trainer the sandbox
    therefore ran after the log-probs instead of at the same time.
    """

    def __init__(self, name: str = "background") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``work`` now; any thread may wait for the future."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Start ``work`` and wait for its result."""
        return self.submit(work).result()

    def stack(self) -> list[str]:
        """The current stack of the loop's thread, as lines of a traceback."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return traceback.format_stack(frame) if frame is not None else []

    def close(self) -> None:
        """Cancel the running coroutines and end the thread."""
        if self.loop.is_closed():
            return
        self.run(_cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _cancel_all() -> None:
    mine = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not mine]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
