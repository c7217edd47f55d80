"""Results of asynchronous runs, remembered and shared while they are under way."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

Result = TypeVar("Result")


def fingerprint(*parts: Any) -> str:
    """A key that two values share only if their JSON forms are equal."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(slots=True)
class CacheCounters:
    """What a cache did so far."""

    hits: int = 0
    """Answered from a remembered result."""
    joined: int = 0
    """Answered by a run that another caller had already started."""
    runs: int = 0
    """Runs started."""


@dataclass(slots=True)
class _Flight(Generic[Result]):
    task: asyncio.Task[Result]
    waiters: int = 0


class Store(Protocol[Result]):
    """Where results are remembered."""

    def get(self, key: str) -> Result:
        """The result of ``key``. Raises ``KeyError`` where there is none."""
        ...

    def put(self, key: str, result: Result) -> None:
        """Remember a result; the store may forget others for it."""
        ...

    def __len__(self) -> int: ...


class MemoryStore(Generic[Result]):
    """In this process: at most ``capacity`` results, the longest unused go first."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"cache capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._results: OrderedDict[str, Result] = OrderedDict()

    def get(self, key: str) -> Result:
        """See ``Store.get``."""
        self._results.move_to_end(key)
        return self._results[key]

    def put(self, key: str, result: Result) -> None:
        """See ``Store.put``."""
        self._results[key] = result
        self._results.move_to_end(key)
        while len(self._results) > self._capacity:
            self._results.popitem(last=False)

    def __len__(self) -> int:
        return len(self._results)


class ResultCache(Generic[Result]):
    """Runs every key once: later callers get the remembered result, simultaneous ones share the
    run.

    A run that raises is not remembered; its error reaches everybody who waits for it. A cancelled
    caller leaves the run to the others, and the last one to leave cancels it. ``keep`` says which
    results may be remembered. They stay in ``store``, or in memory: then at most ``capacity``, the
    longest unused go first. It may move from one event loop to another, but only when nothing is
    under way in the former.
    """

    def __init__(
        self,
        *,
        keep: Callable[[Result], bool],
        capacity: int = 200_000,
        store: Store[Result] | None = None,
    ) -> None:
        self.counters = CacheCounters()
        self._keep = keep
        self._store: Store[Result] = MemoryStore(capacity) if store is None else store
        self._flights: dict[str, _Flight[Result]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._store)

    async def get(self, key: str, run: Callable[[], Awaitable[Result]]) -> tuple[Result, bool]:
        """The result of ``key`` and whether it came without starting ``run``."""
        self._enter_loop()
        try:
            remembered = self._store.get(key)
        except KeyError:
            pass
        else:
            self.counters.hits += 1
            return remembered, True
        flight = self._flights.get(key)
        shared = flight is not None
        if flight is None:
            self.counters.runs += 1
            flight = self._start(key, run)
        else:
            self.counters.joined += 1
        return await self._wait(key, flight), shared

    def _start(self, key: str, run: Callable[[], Awaitable[Result]]) -> _Flight[Result]:
        flight = _Flight(asyncio.ensure_future(self._run(key, run)))
        self._flights[key] = flight
        flight.task.add_done_callback(partial(self._land, key))
        return flight

    async def _wait(self, key: str, flight: _Flight[Result]) -> Result:
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                # Removed at once, so that a new caller does not join a run that is being cancelled.
                self._flights.pop(key, None)
                flight.task.cancel()

    async def _run(self, key: str, run: Callable[[], Awaitable[Result]]) -> Result:
        result = await run()
        if self._keep(result):
            # Here and not in a callback, so that a broken store's error reaches those who wait.
            self._store.put(key, result)
        return result

    def _land(self, key: str, task: asyncio.Task[Result]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
        if not task.cancelled():
            task.exception()  # known to those who wait; nobody else has to be told

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._flights and self._loop is not None and self._loop.is_running():
            raise RuntimeError(
                "the reward cache is in use by another event loop; use one loop at a time"
            )
        self._flights = {}  # runs of a loop that ended under them
        self._loop = loop
