"""The client against a scripted server: what is retried, what is raised, what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from ctrl_megatron.sandbox import SandboxClient, SandboxError
from ctrl_megatron.sandbox.wire import (
    BUSY_HEADER,
    CommandRunResult,
    CommandRunStatus,
    RunCodeRequest,
    RunCodeResponse,
    RunStatus,
    SubmitRequest,
    TestConfig,
)

REQUEST = RunCodeRequest(code="1", language="python")
GOOD = RunCodeResponse(status=RunStatus.SUCCESS).model_dump(mode="json")
SANDBOX_ERROR = RunCodeResponse(status=RunStatus.SANDBOX_ERROR, message="broken").model_dump(
    mode="json"
)


class Script:
    """Answers requests with the given replies in turn, the last one for ever."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.calls = 0
        self.at_once = 0
        self.most_at_once = 0
        self.url = ""
        self.authorized: set[str] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.authorized.add(request.headers.get("Authorization", ""))
        reply = self.replies[min(self.calls, len(self.replies) - 1)]
        self.calls += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self.answer(request, reply)
        finally:
            self.at_once -= 1

    async def answer(self, request: web.Request, reply: Any) -> web.StreamResponse:
        if reply == "hang up":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if reply == "hang":
            await asyncio.sleep(0.3)
            return web.json_response(GOOD)
        if reply == "busy":
            headers = {"Retry-After": "0", BUSY_HEADER: "1"}
            return web.json_response({"detail": "much to do"}, status=503, headers=headers)
        if isinstance(reply, tuple):
            return web.json_response({"detail": reply[1]}, status=reply[0])
        return web.json_response(reply)


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Script]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", script.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    script.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield script
    finally:
        await runner.cleanup()


def client_of(url: str | list[str], **options: Any) -> SandboxClient:
    return SandboxClient(url, **{"backoff": 0.01, "attempts": 3, **options})


@pytest.mark.parametrize(
    "fault",
    ["hang up", (408, "x"), (500, "x"), (503, "busy"), SANDBOX_ERROR, {"not": "the contract"}],
)
def test_faults_of_the_service_are_retried(fault: Any) -> None:
    async def scenario() -> None:
        async with serving(Script(fault, fault, GOOD)) as script, client_of(script.url) as client:
            assert (await client.run_code(REQUEST)).status is RunStatus.SUCCESS
            counters = client.counters
            assert (counters.requests, counters.retries, counters.failures) == (1, 2, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fault", "text"),
    [("hang up", "/run_code failed"), ((500, "why"), "why"), (SANDBOX_ERROR, "broken")],
)
def test_lasting_faults_raise_and_name_the_endpoint(fault: Any, text: str) -> None:
    async def scenario() -> None:
        async with serving(Script(fault)) as script, client_of(script.url) as client:
            with pytest.raises(SandboxError, match=text) as caught:
                await client.run_code(REQUEST)
            assert script.url in str(caught.value)
            assert script.calls == 3
            assert (client.counters.retries, client.counters.failures) == (2, 1)

    asyncio.run(scenario())


def test_a_password_in_an_address_is_sent_and_never_shown() -> None:
    async def scenario() -> None:
        async with serving(Script((500, "why"))) as script:
            secret = script.url.replace("//", "//me:s%40cret@")
            async with client_of(secret) as client:
                for call in (
                    client.run_code(REQUEST),
                    client.isolation_levels(),
                    client.identity(),
                ):
                    with pytest.raises(SandboxError) as caught:
                        await call
                    assert script.url in str(caught.value)
                    assert "cret" not in str(caught.value)
            assert script.authorized == {"Basic bWU6c0BjcmV0"}  # me:s@cret

    asyncio.run(scenario())
    for wrong in ("ftp://me:secret@host", "http://me:secret@", "me:secret@host:80"):
        with pytest.raises(ValueError, match="is no http:// or https:// URL") as caught:
            client_of(wrong)
        assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="leave one out"):
        client_of("http://me:secret@host", token="t" * 16)


def test_faults_inside_a_submission_are_faults() -> None:
    case = {"passed": False, "exec_info": SANDBOX_ERROR}
    answer = {"id": 1, "accepted": False, "extracted_code": "", "tests": [case]}
    request = SubmitRequest(dataset="d", id=1, completion="", config=TestConfig())

    async def scenario() -> None:
        async with serving(Script(answer)) as script, client_of(script.url) as client:
            with pytest.raises(SandboxError, match="broken"):
                await client.submit(request)

    asyncio.run(scenario())


def test_refused_requests_are_not_retried() -> None:
    async def scenario() -> None:
        async with (
            serving(Script((400, "bad language"))) as script,
            client_of(script.url) as client,
        ):
            with pytest.raises(ValueError, match="bad language"):
                await client.run_code(REQUEST)
            assert script.calls == 1

    asyncio.run(scenario())


def test_failures_of_the_program_are_results() -> None:
    run = CommandRunResult(status=CommandRunStatus.TIME_LIMIT_EXCEEDED)
    failed = RunCodeResponse(status=RunStatus.FAILED, run_result=run).model_dump(mode="json")

    async def scenario() -> None:
        async with serving(Script(failed)) as script, client_of(script.url) as client:
            assert (await client.run_code(REQUEST)).status is RunStatus.FAILED
            assert script.calls == 1

    asyncio.run(scenario())


def test_a_request_without_answer_times_out() -> None:
    async def scenario() -> None:
        async with serving(Script("hang")) as script, client_of(script.url, timeout=0.05) as client:
            with pytest.raises(SandboxError, match="TimeoutError"):
                await client.run_code(REQUEST)

    asyncio.run(scenario())


def test_a_service_that_does_not_exist() -> None:
    async def scenario() -> None:
        async with client_of("http://127.0.0.1:9", attempts=2) as client:
            with pytest.raises(SandboxError, match=r"127\.0\.0\.1:9"):
                await client.run_code(REQUEST)
            with pytest.raises(SandboxError, match="does not answer"):
                await client.isolation_levels()

    asyncio.run(scenario())


def test_concurrency_is_bounded_on_the_wire() -> None:
    async def scenario() -> None:
        async with (
            serving(Script("hang")) as script,
            client_of(script.url, max_concurrency=3) as client,
        ):
            await asyncio.gather(*(client.run_code(REQUEST) for _ in range(6)))
            assert script.most_at_once == 3

    asyncio.run(scenario())


def test_a_waiting_retry_holds_no_place() -> None:
    async def scenario() -> None:
        async with (
            serving(Script((500, "x"), GOOD)) as script,
            client_of(script.url, max_concurrency=1, backoff=2.0) as client,
        ):
            first = asyncio.create_task(client.run_code(REQUEST))
            while script.calls == 0:
                await asyncio.sleep(0.01)
            await client.run_code(REQUEST)
            assert not first.done()
            await first

    asyncio.run(scenario())


def test_several_endpoints_share_the_load() -> None:
    async def scenario() -> None:
        async with (
            serving(Script("hang")) as left,
            serving(Script("hang")) as right,
            client_of([left.url, right.url + "/"]) as client,
        ):
            await asyncio.gather(*(client.run_code(REQUEST) for _ in range(6)))
            await client.isolation_levels()
            assert (left.most_at_once, right.most_at_once) == (3, 3)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "make",
    [
        lambda: SandboxClient([]),
        lambda: SandboxClient("localhost:8080"),
        lambda: SandboxClient("http://x", attempts=0),
        lambda: SandboxClient("http://x", max_concurrency=0),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], SandboxClient]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()


def test_a_service_that_is_busy_is_waited_for_however_often_it_says_so() -> None:
    """Its answers are no failed attempts; those in between are counted as ever."""

    async def scenario() -> None:
        async with serving(Script(*["busy"] * 9, (500, "broken"), "busy", GOOD)) as script:
            async with client_of(script.url, attempts=2) as client:
                assert (await client.run_code(REQUEST)).status is RunStatus.SUCCESS
            assert script.calls == 12
        async with serving(Script("busy", (500, "broken"), "busy", (500, "broken"))) as script:
            async with client_of(script.url, attempts=2) as client:
                with pytest.raises(SandboxError, match="gave up after 2 attempts"):
                    await client.run_code(REQUEST)
            assert script.calls == 4

    asyncio.run(scenario())
