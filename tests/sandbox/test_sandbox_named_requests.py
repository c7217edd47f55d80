"""Requests with a number of their client's choice: repeated ones join the work or get its answer,
the service reports progress, and waiting never times out.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from no_wait import run_without_waiting

from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient, SandboxError
from ctrl_megatron.sandbox.service import under_way
from ctrl_megatron.sandbox.service.under_way import UnknownWork, WorkUnderWay
from ctrl_megatron.sandbox.wire import JOB_HEADER, WAIT_HEADER, RunCodeRequest, RunStatus

Post = Callable[..., Awaitable[tuple[int, dict[str, Any], dict[str, str]]]]


@pytest.fixture(scope="module")
def single() -> Iterator[EmbeddedSandbox]:
    with EmbeddedSandbox.start(workers=1) as running:
        yield running


def program(seconds: float, text: str = "done") -> str:
    code = f"import time; time.sleep({seconds}); print({text!r})"
    return RunCodeRequest(code=code, language="python").model_dump_json()


@asynccontextmanager
async def talking(service: EmbeddedSandbox) -> AsyncIterator[Callable[..., Any]]:
    async with aiohttp.ClientSession() as session:

        async def ask(
            method: str, path: str, body: str | None = None, number: str = "", wait: float = 20
        ) -> tuple[int, Any, dict[str, str]]:
            headers = {"Content-Type": "application/json", WAIT_HEADER: f"{wait}"}
            headers |= {JOB_HEADER: number} if number else {}
            async with session.request(
                method, service.endpoint + path, data=body, headers=headers
            ) as answer:
                text = await answer.text()
                return answer.status, json.loads(text) if text else None, dict(answer.headers)

        yield ask


async def counted(ask: Callable[..., Any]) -> dict[str, Any]:
    return (await ask("GET", "/stats"))[1]


def test_a_request_that_is_repeated_joins_the_work_and_gets_its_answer(
    single: EmbeddedSandbox,
) -> None:
    async def scenario() -> None:
        async with talking(single) as ask:
            before = await counted(ask)
            number, body = secrets.token_hex(16), program(0.6)
            status, said, headers = await ask("POST", "/run_code", body, number, 0.1)
            assert (status, said) == (202, {"detail": "under way"})
            assert headers["Location"] == f"/jobs/{number}"
            joined = [ask("POST", "/run_code", body, number), ask("GET", f"/jobs/{number}")]
            answers = await asyncio.gather(*joined)
            answers.append(await ask("POST", "/run_code", body, number, 0))
            for status, said, _ in answers:
                assert status == 200 and said["run_result"]["stdout"] == "done\n"
            assert len({said["run_result"]["execution_time"] for _, said, _ in answers}) == 1
            after = await counted(ask)
            assert after["executions"] == before["executions"] + 1

    asyncio.run(scenario())


def test_numbers_that_cannot_be_used(single: EmbeddedSandbox) -> None:
    async def scenario() -> None:
        async with talking(single) as ask:
            number = secrets.token_hex(16)
            assert (await ask("POST", "/run_code", program(0), number))[0] == 200
            status, said, _ = await ask("POST", "/run_code", program(0, "other"), number)
            assert status == 400 and "another request" in said["detail"]
            for wrong in ("short", "x" * 129, "../../../../stats"):
                assert (await ask("POST", "/run_code", program(0), wrong))[0] == 400
            assert (await ask("GET", f"/jobs/{secrets.token_hex(16)}"))[0] == 404
            assert (await ask("DELETE", f"/jobs/{secrets.token_hex(16)}"))[0] == 204

    asyncio.run(scenario())


def test_work_that_is_withdrawn_ends_at_once(single: EmbeddedSandbox) -> None:
    async def scenario() -> None:
        async with talking(single) as ask:
            before, number = await counted(ask), secrets.token_hex(16)
            assert (await ask("POST", "/run_code", program(8), number, 0.2))[0] == 202
            assert (await ask("DELETE", f"/jobs/{number}"))[0] == 204
            assert (await ask("GET", f"/jobs/{number}"))[0] == 404
            assert (await ask("POST", "/run_code", program(0)))[0] == 200
            assert (await counted(ask))["cancelled"] == before["cancelled"] + 1

    asyncio.run(scenario())


def test_waiting_for_a_worker_is_no_time_out(single: EmbeddedSandbox) -> None:
    """Five programs of 0.4 s on one worker, each client patient with silence for 0.8 s."""

    async def scenario() -> None:
        async with SandboxClient(single.endpoint, timeout=0.8, attempts=1) as client:
            body = RunCodeRequest.model_validate_json(program(0.4))
            answers = await asyncio.gather(*(client.run_code(body) for _ in range(5)))
            assert [answer.status for answer in answers] == [RunStatus.SUCCESS] * 5
            assert client.counters.retries == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("cut_after", [0.05, 0.5])
def test_a_broken_connection_restarts_no_work(single: EmbeddedSandbox, cut_after: float) -> None:
    """A proxy that cuts every connection once after the request went through."""
    host, _, port = single.endpoint.removeprefix("http://").partition(":")
    cuts = 0

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal cuts
        ours, theirs = await asyncio.open_connection(host, int(port))

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                sink.write(data)
            sink.close()

        pumps = [asyncio.create_task(pump(reader, theirs)), asyncio.create_task(pump(ours, writer))]
        if cuts < 2:
            await asyncio.sleep(cut_after)
            cuts += 1
            writer.transport.abort()
            theirs.transport.abort()
        await asyncio.gather(*pumps, return_exceptions=True)

    async def scenario() -> None:
        async with talking(single) as ask:
            before = await counted(ask)
            server = await asyncio.start_server(proxy, "127.0.0.1", 0)
            address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with SandboxClient(address, attempts=4, backoff=0.05) as client:
                body = RunCodeRequest.model_validate_json(program(0.4 + 2 * cut_after))
                answer = await client.run_code(body)
                assert answer.run_result and answer.run_result.stdout == "done\n"
                assert client.counters.retries == 2
            server.close()
            after = await counted(ask)
            assert after["executions"] == before["executions"] + 1
            assert after["cancelled"] == before["cancelled"]

    asyncio.run(scenario())


def test_a_service_that_lost_the_job_is_asked_anew() -> None:
    """Started again at the same address, it knows nothing of the number."""

    async def scenario() -> None:
        first = await asyncio.to_thread(EmbeddedSandbox.start, workers=1)
        port = int(first.endpoint.rpartition(":")[2])
        async with SandboxClient(first.endpoint, timeout=2, attempts=6, backoff=0.3) as client:
            body = RunCodeRequest.model_validate_json(program(0.5))
            task = asyncio.create_task(client.run_code(body))
            await asyncio.sleep(0.2)
            first._process.kill()
            await asyncio.to_thread(first.stop)
            second = await asyncio.to_thread(EmbeddedSandbox.start, workers=1, port=port)
            try:
                assert (await task).status is RunStatus.SUCCESS
            finally:
                await asyncio.to_thread(second.stop)

    asyncio.run(scenario())


def test_abandoned_work_ends_and_answers_are_kept_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(under_way, "ABANDONED_SECONDS", 0.1)
    monkeypatch.setattr(under_way, "ANSWERED_SECONDS", 0.2)
    monkeypatch.setattr(under_way, "KEPT_ANSWERS_BYTES", 25)
    began: list[str] = []

    def work(name: str, seconds: float, fails: bool = False) -> Callable[[], Awaitable[str]]:
        async def do() -> str:
            began.append(name)
            await asyncio.sleep(seconds)
            if fails:
                raise SandboxError(name)
            return name * 10

        return do

    async def scenario() -> None:
        works = WorkUnderWay()
        # Left, and come back in time; then left for good.
        slow = works.begin_or_join("a", b"1", work("a", 0.3))
        assert await works.wait(slow, 0.02) is None
        await asyncio.sleep(0.05)
        assert works.begin_or_join("a", b"1", work("a", 0.3)) is slow
        assert await works.wait(slow, 0.02) is None and began == ["a"]
        await asyncio.sleep(0.15)
        assert slow.task.cancelled() and works.open == 0
        with pytest.raises(UnknownWork):
            works.find("a")
        # A fault is no answer.
        for _ in range(2):
            with pytest.raises(SandboxError):
                await works.wait(works.begin_or_join("b", b"2", work("b", 0.0, fails=True)), 1.0)
        assert began == ["a", "b", "b"]
        # Answers: the oldest goes when there are too many bytes, all go after a time.
        for name in "cde":
            assert (
                await works.wait(works.begin_or_join(name, b"", work(name, 0.0)), 1.0) == name * 10
            )
        with pytest.raises(UnknownWork):
            works.find("c")
        assert await works.wait(works.find("e"), 0) == "e" * 10
        await asyncio.sleep(0.3)
        assert works.open == 0 and not works._works and works._bytes == 0
        # One without a number ends with its only client.
        lone = works.begin_or_join("", b"", work("f", 5.0))
        waiting = asyncio.create_task(works.wait(lone, None))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.sleep(0.02)
        assert lone.task.cancelled() and works.open == 0

    run_without_waiting(scenario)
