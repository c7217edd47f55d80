"""The process an engine lives in: builds it and serves it on loopback.

Started by ``launch.py`` as ``python -m ctrl_megatron.rollout.host --engine NAME --ready-fd N``, in
a process group of its own. Standard input carries one JSON line (token and spec) and stays open:
its end means that the parent is gone. Heavy libraries are imported after the guard of ``lifeline``
has been forked.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ctrl_megatron.rollout.lifeline import tie_group

if TYPE_CHECKING:
    from aiohttp import web

    from ctrl_megatron.rollout.engine import Chunk, Engine, EngineSpec

EXIT_ENGINE_DIED = 70
_HEALTH_SECONDS = 1.0
_MAX_REQUEST_BYTES = 2**30


async def build_engine(spec: EngineSpec) -> Engine:
    """The embedded engine that ``spec`` names."""
    if spec.name == "vllm":
        from ctrl_megatron.rollout.vllm_engine import VllmEngine

        return await VllmEngine.build(spec)
    from ctrl_megatron.rollout.hf_engine import HfEngine

    return HfEngine(spec)


def die(reason: str) -> None:
    """End the whole host at once; clients see the connection close and show ``reason``."""
    print(f"engine host ends: {reason}", file=sys.stderr, flush=True)
    os._exit(EXIT_ENGINE_DIED)


async def answer(call: Callable[[], Awaitable[Any]]) -> web.Response:
    """The result of a call as JSON, or its error."""
    from aiohttp import web

    from ctrl_megatron.rollout.engine import EngineDied
    from ctrl_megatron.rollout.wire import error_to_json

    try:
        return web.json_response({"result": await call()})
    except EngineDied as error:
        die(str(error))
        raise
    except Exception as error:
        traceback.print_exc()
        return web.json_response({"error": error_to_json(error)}, status=500)


def routes(engine: Engine) -> dict[str, Callable[[dict[str, Any]], Awaitable[Any]]]:
    """Path -> what it does with the request's JSON."""
    from ctrl_megatron.rollout import wire

    async def generate(body: dict[str, Any]) -> list[list[wire.Json]]:
        done = await engine.generate(body["prompts"], wire.params_from_json(body["params"]))
        return [[wire.completion_to_json(c) for c in group] for group in done]

    async def manifest(body: dict[str, Any]) -> list[list[Any]]:
        return wire.specs_to_json(await engine.manifest())

    return {
        "/generate": generate,
        "/manifest": manifest,
        "/pause": lambda body: engine.pause(body["mode"]),
        "/resume": lambda body: engine.resume(),
        "/connect": lambda body: engine.connect(body["group"]),
        "/sleep": lambda body: engine.sleep(body["tags"]),
        "/wake": lambda body: engine.wake(body["tags"]),
        "/checksums": lambda body: engine.checksums(),
        "/version": lambda body: engine.version(),
        "/health": lambda body: engine.health(),
    }


async def serve_update(engine: Engine, request: web.Request) -> web.WebSocketResponse:
    """One weight update over a websocket.

    The client sends the specs; then each ``{"next": true}`` of ours, which says that the previous
    chunk has been read, is answered by a chunk, ``{"end": true}`` or ``{"failed": text}``. Ours
    ends with ``{"done": true}`` or ``{"error": ...}``. A connection lost in between fails the
    update.
    """
    from aiohttp import WSMsgType, web

    from ctrl_megatron.rollout import wire

    socket = web.WebSocketResponse(max_msg_size=_MAX_REQUEST_BYTES)
    await socket.prepare(request)

    async def receive() -> dict[str, Any]:
        message = await socket.receive()
        if message.type is not WSMsgType.TEXT:
            raise ConnectionError("the sender of the weights is gone")
        return json.loads(message.data)

    async def chunks() -> AsyncIterator[Chunk]:
        while True:
            await socket.send_json({"next": True})
            data = await receive()
            if "end" in data:
                return
            if "failed" in data:
                raise RuntimeError(f"the sender of the weights failed: {data['failed']}")
            yield wire.chunk_from_json(data)

    try:
        begin = await receive()
        await engine.update(wire.specs_from_json(begin["specs"]), chunks(), begin["version"])
        outcome: wire.Json = {"done": True}
    except Exception as error:
        traceback.print_exc()
        outcome = {"error": wire.error_to_json(error)}
    if not socket.closed:
        await socket.send_json(outcome)
        await socket.close()
    return socket


def application(engine: Engine, token: str) -> web.Application:
    """The HTTP application; every request needs ``Authorization: Bearer TOKEN``."""
    from aiohttp import web

    expected = f"Bearer {token}".encode()

    @web.middleware
    async def authorise(request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, expected):
            raise web.HTTPUnauthorized()
        return await handler(request)

    def post(call: Callable[[dict[str, Any]], Awaitable[Any]]) -> Any:
        async def handle(request: web.Request) -> web.Response:
            body = await request.json()
            return await answer(lambda: call(body))

        return handle

    app = web.Application(middlewares=[authorise], client_max_size=_MAX_REQUEST_BYTES)
    app.add_routes([web.post(path, post(call)) for path, call in routes(engine).items()])
    app.add_routes([web.get("/update", lambda request: serve_update(engine, request))])
    return app


async def watch(engine: Engine) -> None:
    """End the host when its engine has died, also while nobody asks it anything."""
    from ctrl_megatron.rollout.engine import EngineBroken, EngineDied

    while True:
        await asyncio.sleep(_HEALTH_SECONDS)
        try:
            await engine.health()
        except EngineDied as error:
            die(str(error))
        except EngineBroken:
            # Alive; whoever generates is told.
            continue


async def serve(spec: EngineSpec, token: str, ready_fd: int) -> None:
    """Build the engine, write ``{"port": N}`` to ``ready_fd`` and serve until killed.

    There is no gentle end: the guard of ``lifeline`` ends the engine's own processes with this one.
    """
    from aiohttp import web

    engine = await build_engine(spec)
    # A client that goes away cancels its request, so that the engine stops drawing for nobody.
    runner = web.AppRunner(application(engine, token), handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    os.write(ready_fd, json.dumps({"port": port}).encode())
    os.close(ready_fd)
    await watch(engine)


def main() -> None:
    """Entry point; see the module's text."""
    parser = argparse.ArgumentParser(prog="ctrl_megatron.rollout.host")
    parser.add_argument("--engine", required=True, help="shown in process lists")
    parser.add_argument("--ready-fd", required=True, type=int)
    arguments = parser.parse_args()
    started = json.loads(os.fdopen(os.dup(0), "rb", buffering=0).readline())
    tie_group(0)
    os.set_inheritable(arguments.ready_fd, False)
    from ctrl_megatron.rollout.engine import EngineSpec

    try:
        asyncio.run(serve(EngineSpec(**started["spec"]), started["token"], arguments.ready_fd))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
