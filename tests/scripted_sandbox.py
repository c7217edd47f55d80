"""A sandbox service that passes every program but those that know nothing of the problem, until a
script says otherwise.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from ctrl_megatron.rewards.poison import MARK

Fault = Literal["500", "closed", "empty"]
"""An answer with status 500, a closed connection, and an answer without verdicts."""


class Sandbox:
    """The service's handlers. ``fails`` is asked with the number of every request, from 0."""

    def __init__(
        self, fault: Fault = "500", fails: Callable[[int], bool] = lambda number: False
    ) -> None:
        self._fault, self._fails = fault, fails
        self.requests = 0

    async def submit(self, request: web.Request) -> web.Response:
        body, number = await request.json(), self.requests
        if MARK in body["completion"]:
            return self._answer(body, passed=False)
        self.requests += 1
        failing = self._fails(number)
        if failing and self._fault == "closed":
            assert request.transport is not None
            request.transport.close()
        if failing and self._fault == "500":
            return web.json_response({"detail": "the disk of workers is gone"}, status=500)
        return self._answer(body, passed=True, empty=failing)

    def _answer(self, body: dict[str, Any], *, passed: bool, empty: bool = False) -> web.Response:
        data = body["config"]["provided_data"]
        cases = data.get("test_list") or data["test"]
        verdict = {"passed": passed, "exec_info": {"status": "Success", "message": ""}}
        answer = {"id": body["id"], "accepted": passed, "extracted_code": ""}
        return web.json_response({**answer, "tests": [] if empty else [verdict] * len(cases)})

    async def hello(self, _: web.Request) -> web.Response:
        return web.json_response({"identity": "scripted"})


def always(number: int) -> bool:
    """Every request fails."""
    return True


def three_of_ten(number: int) -> bool:
    """Three of ten requests fail."""
    return number % 10 in (0, 4, 7)


def once_written(file: Path) -> Callable[[int], bool]:
    """Requests fail as soon as ``file`` contains anything."""
    return lambda number: file.is_file() and file.stat().st_size > 0


@contextmanager
def serving(sandbox: Sandbox) -> Iterator[str]:
    """The address of the service, which a thread serves."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/submit", sandbox.submit)
    app.router.add_get("/", sandbox.hello)
    app.router.add_get("/v1/ping", sandbox.hello)
    runner = web.AppRunner(app)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
