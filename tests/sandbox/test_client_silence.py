"""No call of the client waits for longer than its limit, whatever the service does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ctrl_megatron.sandbox import SandboxClient, SandboxError
from ctrl_megatron.sandbox.client import SandboxSilent
from ctrl_megatron.sandbox.wire import RunCodeRequest, RunCodeResponse, RunStatus

REQUEST = RunCodeRequest(code="1", language="python")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
LIMIT = 0.8

# What the service writes after a request, and whether it leaves the connection open.
FAULTS: dict[str, tuple[bytes, bool, str]] = {
    "nothing": (b"", True, "TimeoutError.*no sign of life in time"),
    "half an answer, then nothing": (HEAD % 900 + b'{"sta', True, "no sign of life in time"),
    "half an answer, then the end": (HEAD % 900 + b'{"sta', False, "gave up after 3 attempts"),
    "the end": (b"", False, "gave up after 3 attempts"),
    "no HTTP": (b"hello\r\n\r\n", False, "gave up after 3 attempts"),
    "not UTF-8": (HEAD % 4 + b'"\xff\xfe"', False, "not UTF-8.*gave up after 3 attempts"),
    "not JSON": (HEAD % 6 + b"<html>", False, "malformed answer.*gave up after 3 attempts"),
    "deep JSON": (HEAD % 100_000 + b"[" * 100_000, False, "malformed.*gave up after 3 attempts"),
    "other JSON": (HEAD % 9 + b'{"a": [1]', False, "malformed answer.*gave up after 3 attempts"),
    "500": (
        b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops",
        False,
        "answered 500: oops.*gave up after 3 attempts",
    ),
}


@asynccontextmanager
async def answering(text: bytes, stays_open: bool) -> AsyncIterator[str]:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        writer.write(text)
        await writer.drain()
        if stays_open:
            await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, limit=1 << 20)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_call_ends_as_a_fault_that_names_the_service(fault: str) -> None:
    text, stays_open, said = FAULTS[fault]

    async def scenario() -> None:
        async with answering(text, stays_open) as url:
            client = SandboxClient(url, silence=LIMIT, attempts=3, backoff=0.02)
            async with client:
                began = time.monotonic()
                with pytest.raises(SandboxError, match=f"(?s)sandbox {url}.*{said}") as caught:
                    await client.run_code(REQUEST)
                assert time.monotonic() - began < LIMIT + 2
                assert isinstance(caught.value, SandboxSilent) == stays_open
                assert client.counters.failures == 1

    asyncio.run(scenario())


def test_a_silent_service_holds_up_many_requests_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from ctrl_megatron.sandbox.client import sandbox_client

    monkeypatch.setattr(sandbox_client, "_CHECK_SECONDS", 0.05)

    async def scenario() -> None:
        async with (
            answering(b"", True) as url,
            SandboxClient(url, silence=LIMIT) as client,
        ):
            began, two = time.monotonic(), asyncio.Semaphore(2)

            async def one() -> None:
                async with two:
                    await client.run_code(REQUEST)

            answers = await asyncio.gather(*(one() for _ in range(12)), return_exceptions=True)
            assert all(isinstance(answer, SandboxSilent) for answer in answers)
            assert time.monotonic() - began < 2 * LIMIT

    asyncio.run(scenario())


def under_way(more: str = "") -> bytes:
    return f"HTTP/1.1 202 OK\r\nLocation: /jobs/1\r\nContent-Length: 0\r\n{more}\r\n".encode()


BUSY = b"HTTP/1.1 503 Full\r\nX-Sandbox-Busy: 1\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    "text", [under_way(), under_way("X-Sandbox-Finished: 7\r\n"), BUSY], ids=["202", "7", "busy"]
)
def test_a_service_that_only_puts_off_is_given_up(text: bytes) -> None:
    async def scenario() -> None:
        async with (
            answering(text, False) as url,
            SandboxClient(url, silence=LIMIT, backoff=0.02) as client,
        ):
            began = time.monotonic()
            with pytest.raises(SandboxSilent):
                await client.run_code(REQUEST)
            assert LIMIT - 0.1 < time.monotonic() - began < 2 * LIMIT + 1

    asyncio.run(scenario())


def test_a_service_that_serves_others_meanwhile_is_waited_for() -> None:
    began, served = time.monotonic(), 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.1)
        done = RunCodeResponse(status=RunStatus.SUCCESS, message="").model_dump_json().encode()
        late = time.monotonic() - began > 3 * LIMIT
        writer.write(
            HEAD % len(done) + done if late else under_way(f"X-Sandbox-Finished: {served}\r\n")
        )
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with SandboxClient(url, silence=LIMIT, backoff=0.02) as client:
            answer = await client.run_code(REQUEST)
        assert answer.status is RunStatus.SUCCESS and time.monotonic() - began > 3 * LIMIT
        server.close()

    asyncio.run(scenario())


def test_a_stop_ends_a_call_at_once() -> None:
    async def scenario() -> None:
        async with answering(b"", True) as url:
            client = SandboxClient(url)
            call = asyncio.create_task(client.run_code(REQUEST))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            call.cancel()
            await asyncio.wait([call])
            await client.close()
            assert time.monotonic() - began < 10 and call.cancelled()

    asyncio.run(scenario())
