"""The work of requests, which may outlive the connection that brought it.

A client that names its request by a number of its choice may ask again, on the same connection or
another one. It then joins the running work or gets its answer; nothing is judged twice.
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
    """There is no work with this number: it was given up, or its answer is no longer kept."""


@dataclass(slots=True, eq=False)
class Work:
    """The work of one request, and the number of waiting clients."""

    number: str
    digest: bytes
    """SHA-256 of the request's body; empty for unnamed work."""
    task: asyncio.Task[str]
    named: bool
    """Whether the client named the request, so that it may ask again."""
    waiting: int = 0
    fetched: bool = False
    """Whether the answer was delivered."""
    timer: asyncio.TimerHandle | None = None
    """Ends the work, or drops its answer, unless the client asks again."""


@dataclass(slots=True)
class WorkUnderWay:
    """All work of a service. ``open`` is the number of works whose answer was not delivered. For
    one event loop.
    """

    on_change: Callable[[], None] = lambda: None
    """Called when ``open`` has decreased."""
    open: int = 0
    finished: int = 0
    """Works that have ended with an answer or a fault."""
    _works: OrderedDict[str, Work] = field(default_factory=OrderedDict)
    _bytes: int = 0
    """Size of the answers that are kept."""

    def begin_or_join(self, number: str, body: bytes, do: Callable[[], Awaitable[str]]) -> Work:
        """Begin the work ``do`` of the request ``body``, or return the existing work of this
        ``number``. An empty number is replaced by a random one. Raises ``ValueError`` for a number
        that another request has.
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
        """The work with this number. Raises ``UnknownWork``."""
        if number not in self._works:
            raise UnknownWork("no job of this number; send the request again")
        return self._works[number]

    async def wait(self, work: Work, seconds: float | None) -> str | None:
        """Wait up to ``seconds`` for the answer; None if there is none yet. Raises what the work
        raises.

        Work without a waiting client is given up: at once, or after ``ABANDONED_SECONDS`` if the
        client may ask again.
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
        self.finished += not work.task.cancelled()
        failed = work.task.cancelled() or work.task.exception() is not None
        if failed:
            # A fault is not kept: the next request begins anew.
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
