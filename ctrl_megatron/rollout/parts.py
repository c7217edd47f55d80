"""The parts of an engine whose workers are on several hosts: all end when one of them has ended.

Each part is a process of its own, which the first rank of its host starts and, after its end,
starts again. The first part listens at an address that all of them have been given, and every other
one keeps a connection to it for as long as it lives.
"""

from __future__ import annotations

import hmac
import select
import socket
import threading
import time
from collections.abc import Callable

from ctrl_megatron.rollout.engine import EnginePart

_RETRY_SECONDS = 0.5
_GREETING_SECONDS = 5.0
_SILENCE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""Seconds without a sign of life, between two questions, and their number, after which the system
ends a connection to a host that is gone."""


def watch_other_parts(part: EnginePart, end: Callable[[str], None]) -> None:
    """Call ``end(reason)``, in a thread, once another part of the engine has ended."""
    watch = _await_others if part.number == 0 else _stay_with_first
    threading.Thread(target=watch, args=(part, end), name="parts", daemon=True).start()


def _await_others(part: EnginePart, end: Callable[[str], None]) -> None:
    family = socket.AF_INET6 if ":" in part.first else socket.AF_INET
    try:
        listener = socket.create_server((part.first, part.watch_port), family=family)
    except OSError as error:
        end(f"the engine's parts cannot be watched at {part.first}:{part.watch_port}: {error}")
        return
    others: list[socket.socket] = []
    while True:
        for ready in select.select([listener, *others], [], [])[0]:
            if ready is not listener:
                end("a part of the engine on another host has ended")
                return
            other, _ = listener.accept()
            if _greets(other, part.token):
                others.append(other)
            else:
                other.close()


def _greets(other: socket.socket, token: str) -> bool:
    """Whether a connection begins with the token, and so is one of the engine's parts."""
    _end_in_silence(other)
    other.settimeout(_GREETING_SECONDS)
    received = b""
    try:
        while len(received) < len(token) and (more := other.recv(len(token) - len(received))):
            received += more
    except OSError:
        return False
    return hmac.compare_digest(received, token.encode())


def _stay_with_first(part: EnginePart, end: Callable[[str], None]) -> None:
    while True:
        try:
            first = socket.create_connection((part.first, part.watch_port), _GREETING_SECONDS)
            break
        except OSError:
            # It has not come up yet; the launcher limits the time of a start.
            time.sleep(_RETRY_SECONDS)
    _end_in_silence(first)
    first.settimeout(None)
    try:
        first.sendall(part.token.encode())
        first.recv(1)
        reason = "it closed the connection"
    except OSError as error:
        reason = str(error)
    end(f"the engine's first part, on {part.first}, has ended: {reason}")


def _end_in_silence(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _SILENCE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
