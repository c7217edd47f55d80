"""Who gets the next free worker: the peer that has had least of the workers' time, and of its
requests the one that has had least.

A request here is a problem with all its tests, so a problem of a hundred slow cases does not hold
back a hundred of one case each. What a peer says of itself counts for nothing.

Source: start-time fair queueing (Goyal, Vin and Cheng 1996), in two levels. A cost is known only at
its end, so a job counts with the time that it may take until it has ended.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

ItemT = TypeVar("ItemT")


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Share:
    """What a peer or a request has had, in seconds."""

    used: float
    reserved: float = 0.0
    """By jobs that have not ended."""

    @property
    def due(self) -> float:
        """The least is next."""
        return self.used + self.reserved


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Peer(_Share):
    name: str = ""
    begun: float = 0.0
    """The most that one of its requests had had when it was served: where a new one begins."""
    waiting: int = 0
    order: list[tuple[float, int, RequestShare]] = field(default_factory=list)
    """Heap of its requests that wait; entries that are out of date are passed over."""


@dataclass(slots=True, eq=False)
class RequestShare(_Share):
    """One request's place among the others of its peer."""

    peer: _Peer = field(default_factory=lambda: _Peer(0.0))
    number: int = 0
    """In the order of arrival, which decides between equals."""
    places: deque[tuple[float, asyncio.Future[Any]]] = field(default_factory=deque)
    """Of its jobs that wait: the seconds that each may take, and what its item comes through."""


@dataclass(frozen=True, slots=True, eq=False)
class Lease(Generic[ItemT]):
    """An item in use."""

    item: ItemT
    request: RequestShare
    reserved: float
    since: float


class FairQueue(Generic[ItemT]):
    """Items, and jobs that wait for them. For one event loop; ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free: deque[ItemT] = deque()
        self._numbers = itertools.count()
        self._begun = 0.0
        """Like a peer's, for peers."""
        self._peers: WeakValueDictionary[str, _Peer] = WeakValueDictionary()
        """Each as long as one of its requests lasts."""
        self._waiting: dict[str, _Peer] = {}
        self.waiting = 0
        """Jobs that wait for an item."""

    @property
    def peers(self) -> int:
        """Peers that have a job waiting."""
        return len(self._waiting)

    @property
    def free(self) -> int:
        """Items that nobody holds."""
        return len(self._free)

    def enter(self, name: str) -> RequestShare:
        """A new request of the peer ``name``."""
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = _Peer(self._begun, name=name)
        return RequestShare(peer.begun, peer=peer, number=next(self._numbers))

    async def acquire(self, request: RequestShare, seconds: float) -> Lease[ItemT]:
        """The next item for a job of ``request`` that takes ``seconds`` at most; who takes it gives
        it back. The jobs of one request keep their order.
        """
        if self._free:
            item = self._free.popleft()
            self._begin(request, seconds)
        else:
            item = await self._wait(request, seconds)
        return Lease(item, request, seconds, self._clock())

    def release(self, lease: Lease[ItemT], item: ItemT) -> None:
        """Take ``item`` back in place of what was lent, and count how long that was in use."""
        self._count(lease.request, self._clock() - lease.since, -lease.reserved)
        self.add(item)

    def add(self, item: ItemT) -> None:
        """Have one more item: for the job whose turn it is, or for the next that asks."""
        while self._waiting:
            request = self._next()
            seconds, place = request.places.popleft()
            self._leave(request)
            if not place.done():
                self._begin(request, seconds)
                place.set_result(item)
                return
        self._free.append(item)

    async def _wait(self, request: RequestShare, seconds: float) -> ItemT:
        place: asyncio.Future[ItemT] = asyncio.get_running_loop().create_future()
        entry = (seconds, place)
        request.places.append(entry)
        request.peer.waiting += 1
        self.waiting += 1
        self._waiting[request.peer.name] = request.peer
        if len(request.places) == 1:
            heapq.heappush(request.peer.order, (request.due, request.number, request))
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._count(request, 0.0, -seconds)
                self.add(place.result())
            elif entry in request.places:
                # Else its turn came and passed while it was cancelled.
                request.places.remove(entry)
                self._leave(request)
            raise

    def _next(self) -> RequestShare:
        """The request whose turn it is; it waits."""
        peer = min(self._waiting.values(), key=lambda peer: peer.due)
        while True:
            due, _, request = peer.order[0]
            if request.places and due == request.due:
                return request
            heapq.heappop(peer.order)

    def _leave(self, request: RequestShare) -> None:
        """One job less waits."""
        self.waiting -= 1
        request.peer.waiting -= 1
        if not request.peer.waiting:
            request.peer.order.clear()
            del self._waiting[request.peer.name]

    def _begin(self, request: RequestShare, seconds: float) -> None:
        self._begun = max(self._begun, request.peer.used)
        request.peer.begun = max(request.peer.begun, request.used)
        self._count(request, 0.0, seconds)

    def _count(self, request: RequestShare, used: float, reserved: float) -> None:
        for share in (request, request.peer):
            share.used += used
            share.reserved += reserved
        if request.places:
            heapq.heappush(request.peer.order, (request.due, request.number, request))
