"""Work that requests have begun: it may outlive the connection that brought it.

A client that names its request by a number of its own may ask again, on the same connection or
another, and joins the work or gets its answer; nothing that was judged is judged again.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ctrl_megatron.sandbox.limits import ABANDONED_SECONDS, ANSWERED_SECONDS, KEPT_ANSWERS_BYTES


class UnknownWork(LookupError):
    """No work of this number: it was given up, or its answer is not kept any more."""


@dataclass(slots=True, eq=False)
class Work:
    """One request's work and who waits for its answer."""

    number: str
    digest: bytes
    """Of the request."""
    task: asyncio.Task[str]
    named: bool
    """By its client, which may come back for it."""
    waiting: int = 0
    fetched: bool = False
    """Somebody got the answer."""
    timer: asyncio.TimerHandle | None = None
    """What happens when nobody comes back."""


@dataclass(slots=True)
class WorkUnderWay:
    """All of it. ``open`` counts what nobody has got the answer of. For one event loop."""

    on_change: Callable[[], None] = lambda: None
    """Called when ``open`` has become less."""
    open: int = 0
    _works: OrderedDict[str, Work] = field(default_factory=OrderedDict)
    _bytes: int = 0
    """Of answers that are kept."""

    def begin(self, number: str, body: bytes, do: Callable[[], Awaitable[str]]) -> Work:
        """The work of the request ``body``: new, or the one that has this ``number`` already. An
        empty number is a new one that nobody knows. Raises ``ValueError`` for a number that another
        request has.
        """
        digest = hashlib.sha256(body).digest() if number else b""
        known = self._works.get(number)
        if known is not None:
            if known.digest != digest:
                raise ValueError("another request has this job's number")
            return known
        task = asyncio.ensure_future(do())
        work = Work(number or secrets.token_hex(16), digest, task, bool(number))
        self._works[work.number] = work
        self.open += 1
        task.add_done_callback(lambda _: self._done(work))
        return work

    def find(self, number: str) -> Work:
        """The work of that number. Raises ``UnknownWork``."""
        if number not in self._works:
            raise UnknownWork("no job of this number; send the request again")
        return self._works[number]

    async def wait(self, work: Work, seconds: float | None) -> str | None:
        """The answer, None where there is none within ``seconds``. Raises what the work raises.

        Work that nobody waits for is given up: at once, or after ``ABANDONED_SECONDS`` where its
        client may come back.
        """
        work.waiting += 1
        if not work.task.done():
            self._set_timer(work, None)
        try:
            done, _ = await asyncio.wait({work.task}, timeout=seconds)
        finally:
            work.waiting -= 1
            if not work.waiting and not work.task.done():
                self._set_timer(work, ABANDONED_SECONDS if work.named else 0.0)
        if not done:
            return None
        self._close(work)
        if not work.named:
            self._forget(work)
        return work.task.result()

    def give_up(self, work: Work) -> None:
        """End work that nobody wants any more."""
        work.task.cancel()
        self._forget(work)

    def _set_timer(self, work: Work, seconds: float | None) -> None:
        if work.timer is not None:
            work.timer.cancel()
            work.timer = None
        if seconds is not None:
            loop = asyncio.get_running_loop()
            work.timer = loop.call_later(seconds, self.give_up, work)

    def _done(self, work: Work) -> None:
        failed = work.task.cancelled() or work.task.exception() is not None
        if failed:
            # A fault is no answer: who asks again begins anew.
            self._forget(work)
        elif work.number in self._works and work.named:
            self._bytes += len(work.task.result())
            self._works.move_to_end(work.number)
            self._set_timer(work, ANSWERED_SECONDS)
            while self._bytes > KEPT_ANSWERS_BYTES:
                oldest = next(work for work in self._works.values() if work.task.done())
                self._forget(oldest)

    def _close(self, work: Work) -> None:
        if not work.fetched:
            work.fetched = True
            self.open -= 1
            self.on_change()

    def _forget(self, work: Work) -> None:
        self._set_timer(work, None)
        if self._works.pop(work.number, None) is not None:
            task = work.task
            if work.named and task.done() and not task.cancelled() and task.exception() is None:
                self._bytes -= len(task.result())
            self._close(work)
