"""Decides which job gets the next free worker: it goes to the peer that has used the least worker
time, and among that peer's requests to the one that has used the least.

A request here is a problem with all its tests, so a problem with a hundred slow cases does not
delay a hundred problems of one case. Nothing that a peer says about itself matters.

Source: start-time fair queueing (Goyal, Vin and Cheng 1996), on two levels. The cost of a job is
known only at its end; until then it counts with the time that it may take.
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
    """Worker time of a peer or a request, in seconds."""

    used: float
    reserved: float = 0.0
    """Time reserved by jobs that have not ended."""

    @property
    def due(self) -> float:
        """The key of the order: the smallest is next."""
        return self.used + self.reserved


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Peer(_Share):
    name: str = ""
    begun: float = 0.0
    """The largest time that one of its requests had used when it was served; a new request starts
    with it."""
    waiting: int = 0
    order: list[tuple[float, int, RequestShare]] = field(default_factory=list)
    """Heap of its waiting requests; outdated entries are skipped."""


@dataclass(slots=True, eq=False)
class RequestShare(_Share):
    """The share of one request among the requests of its peer."""

    peer: _Peer = field(default_factory=lambda: _Peer(0.0))
    number: int = 0
    """Number in the order of arrival, which decides between equals."""
    places: deque[tuple[float, asyncio.Future[Any]]] = field(default_factory=deque)
    """For each waiting job the seconds that it may take, and the future that receives its item."""


@dataclass(frozen=True, slots=True, eq=False)
class Lease(Generic[ItemT]):
    """An item that a job uses, until ``FairQueue.release``."""

    item: ItemT
    request: RequestShare
    reserved: float
    since: float


class FairQueue(Generic[ItemT]):
    """Distributes items to waiting jobs. For one event loop; ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free: deque[ItemT] = deque()
        self._numbers = itertools.count()
        self._begun = 0.0
        """Like ``_Peer.begun``, for peers."""
        self._peers: WeakValueDictionary[str, _Peer] = WeakValueDictionary()
        """A peer is kept as long as one of its requests exists."""
        self._waiting: dict[str, _Peer] = {}
        self.waiting = 0
        """Number of jobs that wait for an item."""

    @property
    def waiting_peer_count(self) -> int:
        return len(self._waiting)

    @property
    def free_item_count(self) -> int:
        return len(self._free)

    def register_request(self, name: str) -> RequestShare:
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = _Peer(self._begun, name=name)
        return RequestShare(peer.begun, peer=peer, number=next(self._numbers))

    async def acquire(self, request: RequestShare, seconds: float) -> Lease[ItemT]:
        """Wait for an item for a job of ``request`` that takes at most ``seconds``; the caller must
        release the lease. The jobs of one request keep their order.
        """
        if self._free:
            item = self._free.popleft()
            self._begin(request, seconds)
        else:
            item = await self._wait(request, seconds)
        return Lease(item, request, seconds, self._clock())

    def release(self, lease: Lease[ItemT], item: ItemT) -> None:
        """Return ``item`` in place of the leased one, and count the time of its use."""
        self._count(lease.request, self._clock() - lease.since, -lease.reserved)
        self.add(item)

    def add(self, item: ItemT) -> None:
        """Add an item: it goes to the job whose turn it is, or stays free."""
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
                # Otherwise its turn came while it was being cancelled.
                request.places.remove(entry)
                self._leave(request)
            raise

    def _next(self) -> RequestShare:
        """The waiting request whose turn it is."""
        peer = min(self._waiting.values(), key=lambda peer: peer.due)
        while True:
            due, _, request = peer.order[0]
            if request.places and due == request.due:
                return request
            heapq.heappop(peer.order)

    def _leave(self, request: RequestShare) -> None:
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
