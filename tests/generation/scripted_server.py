"""A server of OpenAI's protocol that answers by a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Thread
from typing import Any

from aiohttp import web

from ctrl_megatron.generation.openai_client import OpenAIChat


def good(text: str = "hi", *, prompt: int = 5, completion: int = 3, finish: str = "stop") -> Any:
    return {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
    }


def streamed(*texts: str, finish: str | None = "stop", usage: Any = None, more: str = "") -> Any:
    """The reply ``texts`` as a stream of chunks, ``more`` behind them."""
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": {"content": t}}]} for t in texts]
    chunks.insert(0, {"choices": [{"index": 0, "delta": {"role": "assistant"}}], "usage": None})
    if finish is not None:
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    chunks.append({"choices": [], "usage": usage})
    events = "".join(f": a comment\r\ndata: {json.dumps(chunk)}\r\n\r\n" for chunk in chunks)
    return 200, events + (more or "data: [DONE]\n\n"), {"Content-Type": "text/event-stream"}


class Scripted:
    """Answers requests with the given replies in turn, the last one for ever: an object as JSON,
    ``(status, body)``, ``(status, body, headers)``, text sent unchanged, ``"hang up"``,
    ``"hang"``, or what a function makes of the request's body.
    """

    def __init__(self, *replies: Any) -> None:
        self.replies, self.bodies, self.keys = list(replies), [], []
        self.at_once = self.most_at_once = 0

    async def handle(self, request: web.Request) -> web.Response:
        reply = self.replies[min(len(self.bodies), len(self.replies) - 1)]
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0.02)
            if callable(reply):
                reply = reply(body)
            if reply == "hang":
                await asyncio.sleep(0.5)
            if reply == "hang up":
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            if isinstance(reply, str):
                return web.Response(text=reply, content_type="application/json")
            if isinstance(reply, tuple):
                status, content, *headers = reply
                text = content if isinstance(content, str) else json.dumps(content)
                return web.Response(status=status, text=text, headers=dict(*headers))
            return web.json_response(reply)
        finally:
            self.at_once -= 1


@asynccontextmanager
async def _listening(script: Scripted) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", script.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(script: Scripted, **options: Any) -> AsyncIterator[OpenAIChat]:
    """A client of the server in the running loop."""
    async with _listening(script) as url:
        chat = OpenAIChat(url, "tiny", **{"backoff": 0.01, **options})
        try:
            yield chat
        finally:
            await chat.close()


@contextmanager
def served(script: Scripted) -> Iterator[str]:
    """The address of the server, which runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        server = _listening(script)
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
