"""Who is served next: clients take turns, each client's own requests keep their order."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from contextvars import ContextVar
from typing import Generic, TypeVar

Item = TypeVar("Item")

CLIENT_HEADER = "X-Sandbox-Client"
CLIENT: ContextVar[str] = ContextVar("sandbox_client", default="")
"""Name of the client on whose behalf the current task works."""


class Turns(Generic[Item]):
    """Items that waiting clients get in turn; one that sends a thousand requests delays another
    client's single request by at most one item.

    For one event loop.
    """

    def __init__(self) -> None:
        self._free: deque[Item] = deque()
        self._queues: OrderedDict[str, deque[asyncio.Future[Item]]] = OrderedDict()
        self.waiting = 0
        """Tasks that wait for an item."""

    @property
    def clients(self) -> int:
        """Clients that have a task waiting."""
        return len(self._queues)

    @property
    def free(self) -> int:
        """Items that nobody holds."""
        return len(self._free)

    async def take(self, client: str) -> Item:
        """The next item for ``client``; who takes it gives it back."""
        if self._free:
            return self._free.popleft()
        place: asyncio.Future[Item] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(place)
        self.waiting += 1
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give(place.result())
            else:
                self._leave(client, place)
            raise

    def give(self, item: Item) -> None:
        """Hand ``item`` to the client whose turn it is, or keep it for the next that asks."""
        while self._queues:
            client, queue = next(iter(self._queues.items()))
            place = queue.popleft()
            self.waiting -= 1
            if queue:
                self._queues.move_to_end(client)
            else:
                del self._queues[client]
            if not place.done():
                place.set_result(item)
                return
        self._free.append(item)

    def _leave(self, client: str, place: asyncio.Future[Item]) -> None:
        queue = self._queues.get(client)
        if queue is None or place not in queue:
            return  # its turn came and passed while it was cancelled
        queue.remove(place)
        self.waiting -= 1
        if not queue:
            del self._queues[client]
