"""The process of an engine: builds it and serves it at one address.

Started by ``launch.py`` as ``python -m ctrl_megatron.rollout.server --engine NAME --ready-fd N``,
in a process group of its own. Standard input has one JSON line (token and spec) and stays open: it
ends when the parent is gone. Engines, and with them torch, are imported after the guard of
``parent_watch`` has been forked.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import secrets
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType, web

from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.parallel.parent_watch import end_with_parent
from ctrl_megatron.rollout import wire
from ctrl_megatron.rollout.callback_stream import callback_stream
from ctrl_megatron.rollout.counters import Counters, RequestMeter
from ctrl_megatron.rollout.engine import (
    EmbeddedEngine,
    Engine,
    EngineBroken,
    EngineDied,
    EnginePart,
    EngineSpec,
    LocalEnginePart,
)
from ctrl_megatron.rollout.imports import garbage_collection_paused
from ctrl_megatron.rollout.parts import watch_other_parts
from ctrl_megatron.torch_features import exact_pinned_memory_variables
from ctrl_megatron.types import Completion, Lora, SamplingParams

if TYPE_CHECKING:
    from ctrl_megatron.rollout.weight_chunks import WeightChunk

EXIT_ENGINE_DIED = 70
_HEALTH_SECONDS = 1.0
_DEATH_IS_NOTICED_SECONDS = 2 * _HEALTH_SECONDS
_MAX_REQUEST_BYTES = 2**30
_BUGS = (AttributeError, TypeError, LookupError, NameError)
"""Errors of wrong calls in this package; every other error means that the engine refuses its model
or arguments."""
_LONGEST_CAUSE = 400
_PROBE = SamplingParams(max_tokens=1, temperature=0.0, log_probs=False)
Calls = dict[str, Callable[[wire.Json], Awaitable[Any]]]
"""Path -> what answers a request's body."""


def engine_adapter_class(spec: EngineSpec) -> Any:
    module, _, name = ENGINES[spec.name].adapter.partition(":")
    with garbage_collection_paused():
        return getattr(import_module(module), name)


async def build_engine(spec: EngineSpec) -> EmbeddedEngine:
    """The engine of ``spec`` in this process, after it has computed a token."""
    engine: EmbeddedEngine = await engine_adapter_class(spec).build(spec)
    # Some engines refuse a model only in their first computation.
    await engine.generate([[0]], _PROBE)
    if spec.awaits_weights:
        engine.mark_weights_missing()
    return engine


def end_engine_process(reason: str) -> None:
    """End the whole process at once; clients see the connection close and show ``reason``."""
    print(f"engine server ends: {reason}", file=sys.stderr, flush=True)
    os._exit(EXIT_ENGINE_DIED)


def engine_application(engine: EmbeddedEngine, token: str) -> web.Application:
    """The HTTP application that serves ``engine``; every request needs ``token``."""
    meter, identity = RequestMeter(), secrets.token_hex(8)

    async def process_identity(body: wire.Json) -> str:
        return identity

    calls: Calls = {
        "/generate": partial(answer_generate, engine, meter),
        "/pause": lambda body: engine.pause(body["mode"]),
        "/resume": lambda body: engine.resume(),
        "/sleep": lambda body: engine.sleep(body["level"]),
        "/wake": lambda body: engine.wake(body["tags"]),
        "/checksums": lambda body: engine.checksums(),
        "/log_probs": lambda body: engine.token_log_probs(body["tokens"]),
        "/health": lambda body: engine.health(),
        "/process": process_identity,
        "/counters": lambda body: engine_counters(engine, meter),
    }
    app = build_web_application(calls, token)
    app.router.add_post("/stream", partial(stream_completions, engine, meter))
    app.router.add_get("/update", partial(answer_update, engine))
    return app


def build_web_application(calls: Calls, token: str) -> web.Application:
    """An application for ``calls``; every request needs ``Authorization: Bearer TOKEN``."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def authorise(request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, expected):
            raise web.HTTPUnauthorized()
        return await handler(request)

    app = web.Application(middlewares=[authorise], client_max_size=_MAX_REQUEST_BYTES)
    for path, call in calls.items():
        app.router.add_post(path, partial(call_and_respond, call))
    return app


async def answer_generate(
    engine: EmbeddedEngine, meter: RequestMeter, body: wire.Json
) -> list[list[Any]]:
    prompts, params = body["prompts"], wire.params_from_json(body["params"])
    with meter.count_request(len(prompts) * params.n) as drawn:
        done = await engine.generate(prompts, params)
        drawn([completion for group in done for completion in group])
    return [[wire.completion_to_json(c) for c in group] for group in done]


async def engine_counters(engine: EmbeddedEngine, meter: RequestMeter) -> Counters:
    return {**meter.counters(), **await engine.own_counters()}


async def result_or_error(
    call: Callable[[wire.Json], Awaitable[Any]], request: web.Request
) -> dict[str, Any]:
    """``{"result": what call returns for the request's body}``, or ``{"error": its exception}``."""
    try:
        return {"result": await call(await request.json())}
    except Exception as error:
        return {"error": await error_response(error)}


async def error_response(error: Exception) -> wire.Json:
    """The error of any call as JSON. The engine's death ends the process instead. An error that is
    not ours is answered a moment later: it may be the first sign of a death, as a collective fails
    before the loss of its peer is noticed, and the client has to learn of the death.
    """
    if isinstance(error, EngineDied):
        end_engine_process(str(error))
        raise error
    traceback.print_exception(error)
    if type(error).__name__ not in wire.ERRORS:
        await asyncio.sleep(_DEATH_IS_NOTICED_SECONDS)
    return wire.error_to_json(error)


async def call_and_respond(
    call: Callable[[wire.Json], Awaitable[Any]], request: web.Request
) -> web.Response:
    data = await result_or_error(call, request)
    return web.json_response(data, status=500 if "error" in data else 200)


async def stream_completions(
    engine: EmbeddedEngine, meter: RequestMeter, request: web.Request
) -> web.StreamResponse:
    """Lines of JSON: ``{"tokens": [number, its next tokens]}`` as they are drawn, where the request
    asks for ``tokens``; ``{"finished": [number, completion]}`` as each completion ends; and at the
    end ``{"result": null}`` or ``{"error": ...}``.
    """

    async def draw(send: Callable[[wire.Json], None]) -> None:
        def show(place: int, new: Sequence[int]) -> None:
            send({"tokens": [place, list(new)]})

        async def call(body: wire.Json) -> None:
            prompts, params = body["prompts"], wire.params_from_json(body["params"])
            listener = show if body["tokens"] else None
            with meter.count_request(len(prompts) * params.n) as drawn:

                def finished(place: int, completion: Completion) -> None:
                    drawn([completion])
                    send({"finished": [place, wire.completion_to_json(completion)]})

                await engine.generate(prompts, params, listener, finished=finished)

        send(await result_or_error(call, request))

    response = web.StreamResponse()
    await response.prepare(request)
    async with aclosing(callback_stream(draw)) as lines:
        async for line in lines:
            await response.write(json.dumps(line).encode() + b"\n")
    return response


async def answer_update(engine: Engine, request: web.Request) -> web.WebSocketResponse:
    """One weight update over a websocket.

    The client sends the specs. Then the server sends ``{"next": true}`` whenever the previous chunk
    has been read, and the client answers ``{"chunk": ...}``, with null after the last one, or
    ``{"failed": text}``. The server ends with ``{"done": true}`` or ``{"error": ...}``. A lost
    connection fails the update.
    """
    socket = web.WebSocketResponse(max_msg_size=_MAX_REQUEST_BYTES)
    await socket.prepare(request)
    try:
        begin = await _receive(socket)
        specs, version = wire.specs_from_json(begin["specs"]), begin["version"]
        await engine.update(specs, _chunks(socket), version)
        outcome: wire.Json = {"done": True}
    except Exception as error:
        outcome = {"error": await error_response(error)}
    if not socket.closed:
        await socket.send_json(outcome)
        await socket.close()
    return socket


async def _chunks(socket: web.WebSocketResponse) -> AsyncIterator[WeightChunk]:
    while True:
        await socket.send_json({"next": True})
        answer = await _receive(socket)
        if "failed" in answer:
            raise RuntimeError(f"the sender of the weights failed: {answer['failed']}")
        if answer["chunk"] is None:
            return
        yield answer["chunk"]


async def _receive(socket: web.WebSocketResponse) -> wire.Json:
    message = await socket.receive()
    if message.type is not WSMsgType.TEXT:
        raise ConnectionError("the sender of the weights is gone")
    return json.loads(message.data)


async def exit_when_engine_dies(engine: LocalEnginePart) -> None:
    """End the process when its engine has died, also without requests."""
    while True:
        await asyncio.sleep(_HEALTH_SECONDS)
        try:
            await engine.health()
        except EngineDied as error:
            end_engine_process(str(error))
        except EngineBroken:
            # The process is alive; the next ``generate`` raises it.
            continue


async def serve_engine(spec: EngineSpec, token: str, ready_fd: int) -> None:
    """Build the engine, write ``{"port": N}`` to ``ready_fd`` and serve until killed. A part that
    another one serves only answers whether it works.

    If it cannot be built or draw a token, ``{"error": ..., "is_bug": ...}`` is written instead,
    and the launcher ends the process: if it exited, the launcher's watch would report its death
    before the cause. There is no gentle end: the guard of ``parent_watch`` ends the engine's own
    processes with this one.
    """
    if spec.part is not None:
        watch_other_parts(spec.part, end_engine_process)
    try:
        if spec.is_serving:
            engine = await build_engine(spec)
            app = engine_application(engine, token)
        else:
            engine: LocalEnginePart = await engine_adapter_class(spec).build_part(spec)
            app = build_web_application({"/health": lambda body: engine.health()}, token)
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        if isinstance(error, EngineDied) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        text = " ".join(str(error).split()) or "no message"
        refusal = {
            "error": f"{type(error).__name__}: {text[:_LONGEST_CAUSE]}",
            "is_bug": isinstance(error, _BUGS),
        }
        os.write(ready_fd, json.dumps(refusal).encode())
        await asyncio.Event().wait()
        raise
    # A client that disconnects cancels its request, so that the engine stops drawing.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, spec.host, spec.port).start()
    os.write(ready_fd, json.dumps({"port": runner.addresses[0][1]}).encode())
    os.close(ready_fd)
    await exit_when_engine_dies(engine)


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="ctrl_megatron.rollout.server")
    parser.add_argument("--engine", required=True, help="shown in process lists")
    parser.add_argument("--ready-fd", required=True, type=int)
    arguments = parser.parse_args()
    started = json.loads(os.fdopen(os.dup(0), "rb", buffering=0).readline())
    end_with_parent()
    # Asked here because this interpreter may have another torch than the trainer's.
    os.environ.update(exact_pinned_memory_variables(os.environ))
    # The engine's own processes would inherit it and keep the launcher's pipe open.
    os.set_inheritable(arguments.ready_fd, False)
    try:
        lora, part = (started["spec"].pop(name) for name in ("lora", "part"))
        spec = EngineSpec(
            **started["spec"], lora=lora and Lora.from_json(lora), part=part and EnginePart(**part)
        )
        asyncio.run(serve_engine(spec, started["token"], arguments.ready_fd))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
