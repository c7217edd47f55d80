"""The service's connections: as many as the process has descriptors for, with a policy against
connections that keep others out while they wait for their own client.

If there is no room, the connection that has waited longest for its client is closed, of the peer
that has most connections. If no connection waits for its client, new ones wait to be accepted, and
each existing one is closed after its next answer.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_SWEEP_SECONDS = 0.25
_BACKLOG = 4096
"""Connections that may wait to be accepted. A trainer opens hundreds at the same moment."""
_PATIENCE_SECONDS = 1.0
"""Seconds for which a connection is not closed after it was opened or answered, however many others
wait."""
_SPARE_DESCRIPTORS, _DESCRIPTORS_OF_WORKER = 32, 8
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection. ``since`` is the time from which it waits for its client, None while the
    service works on its request.
    """

    peer: str
    since: float | None
    head: bool = True
    """Whether it waits for a request's head, not for the rest of a request."""
    until: float = 0.0
    """Time by which the head must have arrived."""
    transport: asyncio.Transport | None = None


@dataclass(slots=True)
class ConnectionListener:
    """Accepts connections, tracks what each waits for, and closes those that wait too long. For one
    event loop.
    """

    most: int
    """Maximum of open connections."""
    head_seconds: float
    """Seconds in which a request's head must arrive, from its first byte or from the start of the
    connection."""
    idle_seconds: float
    """Seconds that a connection may stay without a request."""
    peer_of: Callable[[str | None], str] = str
    """Maps an address to the peer that it belongs to."""
    _factory: Callable[[], asyncio.Protocol] | None = None
    _sockets: list[socket.socket] = field(default_factory=list)
    _connections: dict[int, _Connection] = field(default_factory=dict)
    """Connections by descriptor."""
    _by_transport: dict[Any, _Connection] = field(default_factory=dict)
    _accepting: bool = False
    _sweeping: asyncio.TimerHandle | None = None
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def open_connection_count(self) -> int:
        return len(self._connections)

    async def listen(
        self, host: str, port: int, factory: Callable[[], asyncio.Protocol]
    ) -> tuple[str, int]:
        """Accept connections for protocols of ``factory``. Returns the first address. Raises
        ``OSError``.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listener = socket.socket(family, kind, protocol)
            self._sockets.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        self._factory = factory
        self._accept_again()
        self._sweep()
        name = self._sockets[0].getsockname()
        return name[0], name[1]

    def close(self) -> None:
        self._pause()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for listener in self._sockets:
            listener.close()
        self._sockets.clear()

    def head_received(self, transport: Any) -> None:
        if (state := self._by_transport.get(transport)) is not None:
            state.head = False

    def request_received(self, transport: Any) -> None:
        """Note that a request has arrived completely: from now on the client waits
        for the service.
        """
        if (state := self._by_transport.get(transport)) is not None:
            state.since = None

    def request_answered(self, transport: Any) -> bool:
        """Note that a request was answered. Returns whether to close the connection because others
        wait.
        """
        if (state := self._by_transport.get(transport)) is not None:
            now = asyncio.get_running_loop().time()
            state.since, state.head = now, True
            state.until = now + self.idle_seconds
        return bool(self._sockets) and not self._accepting

    def start_head_deadline(self, state: _Connection) -> None:
        if state.head and state.since is not None:
            now = asyncio.get_running_loop().time()
            state.until = min(state.until, now + self.head_seconds)

    def connection_closed(self, number: int, state: _Connection) -> None:
        self._connections.pop(number, None)
        self._by_transport.pop(state.transport, None)
        if self._sockets and not self._accepting:
            self._accept_again()

    def connection_opened(self, state: _Connection, transport: asyncio.Transport) -> None:
        state.transport = transport
        self._by_transport[transport] = state

    def _accept_again(self) -> None:
        self._accepting = True
        for listener in self._sockets:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _pause(self) -> None:
        self._accepting = False
        for listener in self._sockets:
            asyncio.get_running_loop().remove_reader(listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection, or make room for it."""
        loop = asyncio.get_running_loop()
        if self.open_connection_count >= self.most:
            # New connections wait until one ends.
            self._pause()
            self._close_longest_waiting()
            return
        try:
            connection, address = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in _SCARCE:
                raise
            _log.error("no connection can be accepted: %s", error.strerror)
            self._pause()
            self._close_longest_waiting()
            return
        connection.setblocking(False)
        now = loop.time()
        state = _Connection(self.peer_of(address[0]), now, until=now + self.head_seconds)
        self._connections[connection.fileno()] = state
        task = loop.create_task(self._start(connection, state))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, connection: socket.socket, state: _Connection) -> None:
        assert self._factory is not None
        number, inner = connection.fileno(), self._factory()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _WatchedProtocol(self, number, state, inner), connection
            )
        except OSError as error:
            _log.warning("a connection ended before it was accepted: %s", error)
            connection.close()
            self.connection_closed(number, state)

    def _close_longest_waiting(self) -> bool:
        """Close the connection that has waited longest for its client, of the peer with most
        connections. Returns whether there is one.
        """
        latest = asyncio.get_running_loop().time() - _PATIENCE_SECONDS
        waiting = [
            (state.since, state)
            for state in self._connections.values()
            if state.since is not None and state.since <= latest and state.transport is not None
        ]
        if not waiting:
            return False
        held = Counter(state.peer for state in self._connections.values())
        _, longest = min(waiting, key=lambda one: (-held[one[1].peer], one[0]))
        assert longest.transport is not None
        longest.transport.abort()
        return True

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for state in list(self._connections.values()):
            late = state.head and state.since is not None and now > state.until
            if late and state.transport is not None:
                state.transport.abort()
        if self._sockets and not self._accepting:
            self._accept_again()
        self._sweeping = loop.call_later(_SWEEP_SECONDS, self._sweep)


class _WatchedProtocol(asyncio.Protocol):
    """Forwards all events to the HTTP protocol and notifies the listener."""

    def __init__(
        self, listener: ConnectionListener, number: int, state: _Connection, inner: asyncio.Protocol
    ) -> None:
        self._listener, self._number, self._state, self._inner = listener, number, state, inner
        self.pause_writing = inner.pause_writing
        self.resume_writing = inner.resume_writing
        self.eof_received = inner.eof_received

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._listener.connection_opened(self._state, transport)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._listener.start_head_deadline(self._state)
        self._inner.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.connection_closed(self._number, self._state)
        self._inner.connection_lost(exc)


def room_for_connections(most: int, workers: int) -> int:
    """The number of connections, at most ``most``, that the process has descriptors for. Raises
    ``OSError`` if there are too few for a single one.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return most
    own = len(os.listdir("/proc/self/fd"))
    room = soft - own - _SPARE_DESCRIPTORS - _DESCRIPTORS_OF_WORKER * workers
    if room < 1:
        needed = soft - room + 1
        text = f"{workers} workers need at least {needed} file descriptors (ulimit -n), not {soft}"
        raise OSError(errno.EMFILE, text)
    return min(most, room)
