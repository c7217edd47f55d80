"""The HTTP service: SandboxFusion's routes over the pool of workers."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel

from ctrl_megatron.sandbox import gate, telemetry
from ctrl_megatron.sandbox.execution import Executor
from ctrl_megatron.sandbox.grading import judge, list_datasets
from ctrl_megatron.sandbox.wire import (
    LEVEL_HEADER,
    RunCodeRequest,
    RunCodeResponse,
    RunStatus,
    SubmitRequest,
)
from ctrl_megatron.sandbox.workers import Pool, WorkerFault

Body = TypeVar("Body", bound=BaseModel)
POOL = web.AppKey("pool", Pool)
EXECUTOR = web.AppKey("executor", Executor)
_log = logging.getLogger(__name__)


def build_app(pool: Pool, *, token: str | None = None) -> web.Application:
    """The application over a started pool; with ``token`` it wants that bearer token."""
    app = web.Application(
        client_max_size=pool.settings.limits.request_bytes, middlewares=[gate.count, gate.admit]
    )
    app[gate.GATE] = gate.Gate(token=token)
    app[POOL] = pool
    app[EXECUTOR] = Executor(pool)
    app.router.add_post("/run_code", run_code)
    app.router.add_post("/submit", submit)
    app.router.add_get("/list_datasets", datasets)
    app.router.add_get("/v1/ping", ping)
    app.router.add_get("/stats", stats)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/", status)
    return app


async def run_code(request: web.Request) -> web.Response:
    """Run one program; a fault of ours is a 200 with ``SandboxError``, as the contract has it."""
    asked = await _body(request, RunCodeRequest)
    try:
        return _json(await request.app[EXECUTOR].answer(asked))
    except WorkerFault as fault:
        _log.error("run_code failed: %s", fault)
        return _json(RunCodeResponse(status=RunStatus.SANDBOX_ERROR, message=str(fault)))


async def submit(request: web.Request) -> web.Response:
    """Judge one completion; a fault of ours is a 500, never a failed verdict."""
    return _json(await judge(request.app[EXECUTOR], await _body(request, SubmitRequest)))


async def datasets(request: web.Request) -> web.Response:
    """The data set kinds that ``/submit`` judges."""
    return web.json_response(list_datasets())


async def ping(request: web.Request) -> web.Response:
    """``pong``, or 503 while the service ends; headers name the isolation reached."""
    if request.app[gate.GATE].draining:
        return gate.busy("the service is shutting down")
    reached = request.app[POOL].isolation
    headers = {
        "X-Sandbox-Isolation": str(reached.get("tier", "starting")),
        LEVEL_HEADER: str(reached.get("level", "starting")),
    }
    return web.json_response("pong", headers=headers)


async def metrics(request: web.Request) -> web.Response:
    """Counters and durations in Prometheus' text format."""
    pool, state = request.app[POOL], request.app[gate.GATE]
    done = pool.counters
    lines = [
        *state.telemetry.lines(),
        *telemetry.counter("sandbox_jobs_total", "Jobs that workers ran.", done.executions),
        *telemetry.counter("sandbox_job_timeouts_total", "Jobs out of time.", done.timeouts),
        *telemetry.counter("sandbox_worker_faults_total", "Workers that failed.", done.faults),
        *telemetry.counter("sandbox_worker_restarts_total", "Workers replaced.", done.restarts),
        *telemetry.duration("sandbox_queue_seconds", "Wait for a worker.", pool.queue_seconds),
        *telemetry.duration("sandbox_job_seconds", "Time on a worker.", pool.job_seconds),
        *telemetry.gauge("sandbox_workers", "Workers.", pool.size),
        *telemetry.gauge("sandbox_workers_free", "Workers without a job.", pool.free),
        *telemetry.gauge("sandbox_queue_length", "Jobs that wait.", pool.waiting),
        *telemetry.gauge("sandbox_clients_waiting", "Clients with a job waiting.", pool.clients),
        *telemetry.gauge("sandbox_requests_running", "Requests in work.", state.running),
        *telemetry.gauge("sandbox_draining", "1 while the service ends.", state.draining),
        *(telemetry.isolation(pool.isolation) if pool.isolation else ()),
    ]
    return web.Response(
        body="\n".join([*lines, ""]).encode(), headers={"Content-Type": telemetry.CONTENT_TYPE}
    )


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
    try:
        text = record.model_dump_json()
    except ValueError as error:
        # Ours to mend, not the request's fault.
        raise WorkerFault(f"the answer cannot be written as JSON: {error}") from error
    return web.Response(text=text, content_type="application/json")
