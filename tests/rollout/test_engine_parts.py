"""The parts of an engine on several hosts notice each other's end."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest

from ctrl_megatron.parallel.hosts import LOOPBACK, free_ports
from ctrl_megatron.rollout import parts
from ctrl_megatron.rollout.engine import EnginePart


class Ends:
    """What a part was told, and when."""

    def __init__(self) -> None:
        self.reason, self.told = "", threading.Event()

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self.told.set()


@pytest.fixture
def first() -> EnginePart:
    group, watch = free_ports(LOOPBACK, 2)
    return EnginePart(
        number=0, of=3, first=LOOPBACK, group_port=group, watch_port=watch, token="secret"
    )


def connected(part: EnginePart, greeting: bytes) -> socket.socket:
    """A connection as another part makes it."""
    deadline = time.monotonic() + 20
    while True:
        try:
            own = socket.create_connection((part.first, part.watch_port), 20)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    own.sendall(greeting)
    return own


def test_the_first_part_ends_with_any_other(first: EnginePart) -> None:
    ends = Ends()
    parts.watch_other_parts(first, ends)
    stranger = connected(first, b"guess!")
    assert stranger.recv(1) == b"", "it is no part, and is sent away"
    one, other = connected(first, b"secret"), connected(first, b"secret")
    assert not ends.told.wait(0.1)
    other.close()
    assert ends.told.wait(20) and "on another host has ended" in ends.reason
    one.close()


def test_every_other_part_ends_with_the_first(
    first: EnginePart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_RETRY_SECONDS", 0.02)
    ends = Ends()
    # It comes up before the first part listens.
    parts.watch_other_parts(replace(first, number=1), ends)
    time.sleep(0.05)
    with socket.create_server((LOOPBACK, first.watch_port)) as listener:
        own, _ = listener.accept()
        assert own.recv(6) == b"secret"
        assert not ends.told.wait(0.1)
        own.close()
    assert ends.told.wait(20) and f"first part, on {LOOPBACK}, has ended" in ends.reason


def test_a_port_that_is_taken_is_no_reason_to_go_on_unwatched(first: EnginePart) -> None:
    ends = Ends()
    with socket.create_server((LOOPBACK, first.watch_port)):
        parts.watch_other_parts(first, ends)
        assert ends.told.wait(20) and "cannot be watched at 127.0.0.1" in ends.reason
