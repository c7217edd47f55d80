"""Connections without a request, and a service with few descriptors."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctrl_megatron.sandbox import RunCodeRequest, SandboxClient
from ctrl_megatron.sandbox.service.connections import ConnectionListener, room_for_connections

ROOT = Path(__file__).parents[2]
DESCRIPTORS, COUNT = 96, 100
HEAD = b"POST /run_code HTTP/1.1\r\nHost: localhost\r\nX-A: "


@pytest.fixture(scope="module")
def narrow() -> Iterator[tuple[str, int]]:
    """Host and port of a service that may open few descriptors."""
    limits = json.dumps({"head_seconds": 1.0, "body_seconds": 9.0})
    command = [sys.executable, "-m", "ctrl_megatron.sandbox", "--port", "0", "--workers", "1"]
    with subprocess.Popen(
        [*command, "--log-level", "warning", "--limits", limits],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
    ) as process:
        assert process.stdout is not None
        announced = json.loads(process.stdout.readline())
        yield announced["host"], announced["port"]
        process.terminate()


async def open_many(address: tuple[str, int], sent: bytes, count: int) -> list[Any]:
    found = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        found.append((reader, writer))
    return found


async def closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1 << 16) == b""
    except ConnectionError:
        return True


async def honest(address: tuple[str, int], count: int = 1) -> None:
    url = f"http://{address[0]}:{address[1]}"
    async with SandboxClient(url, timeout=10, attempts=1) as client:
        request = RunCodeRequest(code="print(1)", language="python")
        for answer in await asyncio.gather(*(client.run_code(request) for _ in range(count))):
            assert answer.run_result and answer.run_result.stdout == "1\n"


@pytest.mark.parametrize("sent", [b"", HEAD])
def test_unfinished_heads_are_closed_and_block_no_client(
    narrow: tuple[str, int], sent: bytes
) -> None:
    async def scenario() -> None:
        held = await open_many(narrow, sent, COUNT)
        began = time.monotonic()
        await honest(narrow, 3)
        async with asyncio.timeout(10):
            for reader, writer in held:
                assert await closed(reader)
                writer.close()
        assert time.monotonic() - began < 6

    asyncio.run(scenario())


def test_unfinished_bodies_block_no_client(narrow: tuple[str, int]) -> None:
    async def scenario() -> None:
        head = b"POST /submit HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\n\r\n{"
        held = await open_many(narrow, head, COUNT)
        began = time.monotonic()
        await honest(narrow, 3)
        assert time.monotonic() - began < 6
        for _, writer in held:
            writer.close()

    asyncio.run(scenario())


def test_a_head_that_comes_byte_by_byte_is_cut_off(narrow: tuple[str, int]) -> None:
    async def scenario() -> None:
        ((reader, writer),) = await open_many(narrow, HEAD, 1)
        waiting, began = asyncio.create_task(closed(reader)), time.monotonic()
        while not waiting.done() and time.monotonic() - began < 8:
            writer.write(b"a")
            await asyncio.sleep(0.1)
        assert waiting.done() and 0.9 < time.monotonic() - began < 4
        writer.close()

    asyncio.run(scenario())


def test_more_clients_than_connections_are_all_served(narrow: tuple[str, int]) -> None:
    asyncio.run(honest(narrow, COUNT))


def test_a_connection_lives_on_between_its_requests(narrow: tuple[str, int]) -> None:
    async def scenario() -> None:
        reader, writer = await asyncio.open_connection(*narrow)
        for pause in (1.3, 0.0):
            writer.write(b"GET /v1/ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b'"pong"' in await reader.readuntil(b'"pong"')
            # Longer than a head may take, but none has begun.
            await asyncio.sleep(pause)
        assert not reader.at_eof()
        writer.close()

    asyncio.run(scenario())


def test_the_peer_with_most_connections_loses_one() -> None:
    """Among the connections that wait for their client, in any order of arrival."""

    async def scenario() -> None:
        listener = ConnectionListener(
            4, head_seconds=60, idle_seconds=60, peer_of=lambda _: next(names)
        )
        names = iter("abbba")
        address = await listener.listen("127.0.0.1", 0, asyncio.Protocol)
        held = await open_many(address, b"x", 4)
        while listener.open_connection_count < 4:
            await asyncio.sleep(0.01)
        held += await open_many(address, b"x", 1)
        ends = [asyncio.create_task(closed(reader)) for reader, _ in held]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=5)
        assert [ends.index(task) for task in done] == [1]
        listener.close()
        for task in ends:
            task.cancel()
        for _, writer in held:
            writer.close()

    asyncio.run(scenario())


def test_the_number_of_connections_follows_from_the_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        assert 200 < room_for_connections(4096, 2) < 480
        assert room_for_connections(100, 2) == 100
        with pytest.raises(OSError, match="100 workers need at least"):
            room_for_connections(4096, 100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
