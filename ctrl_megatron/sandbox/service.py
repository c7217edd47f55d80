"""The HTTP service: SandboxFusion's routes over the pool of workers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from ctrl_megatron.sandbox import jobs
from ctrl_megatron.sandbox.grading import judge
from ctrl_megatron.sandbox.wire import RunCodeRequest, RunCodeResponse, RunStatus, SubmitRequest
from ctrl_megatron.sandbox.workers import Pool, QueueFull, WorkerFault

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Body = TypeVar("Body", bound=BaseModel)
POOL = web.AppKey("pool", Pool)
_log = logging.getLogger(__name__)


def build_app(pool: Pool) -> web.Application:
    """The application over a started pool."""
    app = web.Application(
        client_max_size=pool.settings.limits.request_bytes, middlewares=[_errors_as_json]
    )
    app[POOL] = pool
    app.router.add_post("/run_code", run_code)
    app.router.add_post("/submit", submit)
    app.router.add_get("/v1/ping", ping)
    app.router.add_get("/stats", stats)
    app.router.add_get("/", status)
    return app


async def run_code(request: web.Request) -> web.Response:
    """Run one program; a fault of ours is a 200 with ``SandboxError``, as the contract has it."""
    pool = request.app[POOL]
    asked = await _body(request, RunCodeRequest)
    if asked.language != "python":
        raise ValueError(f"language {asked.language!r} is not supported; this sandbox runs python")
    job = jobs.request_job(pool.settings.limits, asked)
    try:
        result = await pool.run(job, seconds=job["seconds"])
    except WorkerFault as fault:
        _log.error("run_code failed: %s", fault)
        return _json(RunCodeResponse(status=RunStatus.SANDBOX_ERROR, message=str(fault)))
    return _json(jobs.run_response(result.end, asked.fetch_files))


async def submit(request: web.Request) -> web.Response:
    """Judge one completion; a fault of ours is a 500, never a failed verdict."""
    return _json(await judge(request.app[POOL], await _body(request, SubmitRequest)))


async def ping(request: web.Request) -> web.Response:
    """``pong``; the isolation reached is in a header."""
    tier = request.app[POOL].isolation.get("tier", "starting")
    return web.json_response("pong", headers={"X-Sandbox-Isolation": tier})


async def stats(request: web.Request) -> web.Response:
    """Counters since the start, the queue's length now, and the isolation reached."""
    pool = request.app[POOL]
    return web.json_response(
        {
            "queue_length": pool.waiting,
            "workers": pool.size,
            **asdict(pool.counters),
            "isolation": pool.isolation,
        }
    )


async def status(request: web.Request) -> web.Response:
    """What this service is and how it isolates programs."""
    pool = request.app[POOL]
    limits = pool.settings.limits.as_dict()
    return web.json_response(
        {"service": "ctrl_megatron sandbox", "isolation": pool.isolation, "limits": limits}
    )


async def _body(request: web.Request, kind: type[Body]) -> Body:
    return kind.model_validate_json(await request.read())


def _json(record: BaseModel) -> web.Response:
    return web.Response(text=record.model_dump_json(), content_type="application/json")


def _refusal(status_code: int, detail: object) -> web.Response:
    return web.json_response({"detail": detail}, status=status_code)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False, include_input=False)
        return _refusal(422, detail)
    except ValueError as error:
        return _refusal(400, str(error))
    except QueueFull as error:
        return _refusal(503, str(error))
    except WorkerFault as error:
        _log.error("%s failed: %s", request.path, error)
        return _refusal(500, str(error))
    except web.HTTPException as error:
        return _refusal(error.status, error.reason)
    except Exception as error:
        _log.exception("%s failed", request.path)
        return _refusal(500, f"{type(error).__name__}: {error}")
