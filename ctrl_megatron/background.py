"""Work beside the main thread: event loops in threads of their own, calls of functions that may
never return, calls that fail together, and the words for what a process waits for.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_TURN_SECONDS = 0.5
_CLOSE_SECONDS = 5.0
_LONGEST_LOOK = 2.0


class BackgroundLoop:
    """Runs from the start of the trainer, so that a submitted coroutine begins at once.

    A task on a loop that is not running does not start. In the published CTRL trainer the sandbox
    therefore ran after the log-probs instead of at the same time.
    """

    def __init__(self, name: str = "background") -> None:
        self.loop = asyncio.new_event_loop()
        self.turns = 0
        """Grows every half second while no coroutine blocks the loop."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.loop.call_soon(self._turn)
        self.loop.run_forever()

    def _turn(self) -> None:
        self.turns += 1
        self.loop.call_later(_TURN_SECONDS, self._turn)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``work`` now; any thread may wait for the future."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 600.0) -> T:
        """Start ``work`` and wait for its result. TimeoutError after ``seconds``; the work is
        cancelled then.
        """
        future = self.submit(work)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise

    def run_before_close(self, work: Coroutine[Any, Any, object]) -> None:
        """Start ``work``, which closes connections, and wait for its end, but not for long: a loop
        that a coroutine blocks must not keep the run from ending.
        """
        with suppress(TimeoutError):
            self.run(work, _CLOSE_SECONDS)

    def running_task_name(self) -> str:
        """The name of the task that the loop runs right now; empty while it runs none."""
        task = asyncio.current_task(self.loop)
        return task.get_name() if task is not None else ""

    def stack_lines(self) -> list[str]:
        """The current stack of the loop's thread, as lines of a traceback."""
        return traceback.format_list(_stack_of(self._thread))

    def current_line(self) -> str:
        """``FILE line N`` that the loop's thread is running."""
        return _place(self._thread)

    def close(self) -> None:
        """Cancel the running coroutines and end the thread. A coroutine that blocks the loop, or
        that ignores its end for some seconds, is left behind; it does not keep the process alive.
        """
        if self.loop.is_closed():
            return
        try:
            self.run(_cancel_all(), _CLOSE_SECONDS)
        except TimeoutError:
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self.loop.close()


async def _cancel_all() -> None:
    mine = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not mine]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class AbandonableCall(Generic[T]):
    """``function()`` in a thread of its own. A thread cannot be ended, so a caller that gives up
    leaves it behind; unlike a pool's, it does not keep the process from ending.
    """

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self.future: Future[T] = Future()
        context = contextvars.copy_context()

        def run() -> None:
            try:
                result = context.run(function)
            except BaseException as error:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)

        self.future.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def current_line(self) -> str:
        """``FILE line N`` that the function is running."""
        return _place(self._thread)


async def gather_results(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run all calls together and return their results in order; the first exception cancels the
    other calls and is raised.
    """
    tasks = [asyncio.ensure_future(call()) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class StallClock:
    """How long a counter has been the same, in seconds during which this process ran.

    A process that was stopped for a while has looked at nothing meanwhile, so that time is not
    held against others.
    """

    def __init__(self) -> None:
        self._seen: object = None
        self._at, self._still = time.monotonic(), 0.0

    def seconds_unchanged(self, counter: int) -> float:
        """Call it every second or more often with the counter's present value."""
        now = time.monotonic()
        passed, self._at = min(now - self._at, _LONGEST_LOOK), now
        self._still = self._still + passed if counter == self._seen else 0.0
        self._seen = counter
        return self._still


def _stack_of(thread: threading.Thread) -> traceback.StackSummary:
    frame = sys._current_frames().get(thread.ident or 0)
    found = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
    del frame
    return found


def _place(thread: threading.Thread) -> str:
    """The innermost line outside libraries, if there is one."""
    stack = _stack_of(thread)
    libraries = (sys.prefix, sys.base_prefix, "<")
    own = [f for f in stack if not f.filename.startswith(libraries)] or list(stack)
    return f"{own[-1].filename} line {own[-1].lineno}" if own else "an unknown place"


@dataclass(slots=True, eq=False)
class WaitProgress:
    """Work on ``count`` things, of which ``done`` are ready. 0 of ``count`` leaves the number out.

    Several threads may read it while one counts.
    """

    what: str
    count: int = 0
    unit: str = "rows"
    done: int = 0

    def __str__(self) -> str:
        if not self.count:
            return self.what
        part = f"{self.done} of " if self.done else ""
        return f"{self.what} on {part}{self.count} {self.unit}"


_open: list[WaitProgress] = []
_lock = threading.Lock()
_current: ContextVar[WaitProgress | None] = ContextVar("awaited", default=None)


@contextmanager
def track_wait(what: str, count: int = 0, unit: str = "rows") -> Iterator[WaitProgress]:
    """The body waits for ``what``. Code that it calls, also in other threads and on other event
    loops, counts its progress with ``advance_wait``.
    """
    item = WaitProgress(what, count, unit)
    token = _current.set(item)
    with _lock:
        _open.append(item)
    try:
        yield item
    finally:
        with _lock:
            _open.remove(item)
        _current.reset(token)


def advance_wait() -> None:
    """Count one more finished thing of the innermost ``track_wait`` around the caller, if any."""
    if (item := _current.get()) is not None:
        item.done += 1


def describe_waits() -> list[str]:
    """Descriptions of all that the process waits for, the oldest first."""
    with _lock:
        return [str(item) for item in _open]
