"""The HTTP service: SandboxFusion's routes over the pool of workers, and what every request passes
before: counting, errors as JSON, the token, the refusal of new work while the service ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from ctrl_megatron.sandbox import wire
from ctrl_megatron.sandbox.access import is_allowed
from ctrl_megatron.sandbox.datasets import READERS
from ctrl_megatron.sandbox.limits import CHECKED_BYTES, JSON_VALUES, VERDICT_CHARACTERS
from ctrl_megatron.sandbox.service.grading import grade
from ctrl_megatron.sandbox.service.programs import ProgramRunner
from ctrl_megatron.sandbox.service.reading import aside
from ctrl_megatron.sandbox.service.telemetry import CONTENT_TYPE, RequestTelemetry, metric_lines
from ctrl_megatron.sandbox.service.workers import (
    CURRENT_CLIENT,
    CURRENT_REQUEST,
    QueueFull,
    WorkerFault,
    WorkerPool,
)

BodyT = TypeVar("BodyT", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN_ROUTES = ("/v1/ping",)
"""Answered without a token, for health checks."""
_RETRY_SECONDS = 2
_CLIENT_LENGTH = 128
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ServiceState:
    """What all requests share."""

    pool: WorkerPool
    runner: ProgramRunner
    token: str | None = None
    telemetry: RequestTelemetry = field(default_factory=RequestTelemetry)
    draining: bool = False
    """The service ends: running requests finish, new ones are refused."""
    running: int = 0
    """Requests that do work: POST."""
    held: int = 0
    """Bytes that they hold, at most: their bodies and the verdicts on them."""
    arrivals: Iterator[int] = field(default_factory=itertools.count)
    """Numbers for requests."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last request has ended while the service drains."""

    async def drain(self, seconds: float) -> None:
        """Refuse new work and wait for the running, at most ``seconds``."""
        self.draining = True
        if self.running:
            try:
                await asyncio.wait_for(self.idle.wait(), seconds)
            except TimeoutError:
                return


STATE = web.AppKey("state", ServiceState)


def build_app(pool: WorkerPool, *, token: str | None = None) -> web.Application:
    """The application over a started pool; with ``token`` it wants that bearer token."""
    app = web.Application(
        client_max_size=pool.settings.limits.request_bytes, middlewares=[_count, _admit]
    )
    app[STATE] = ServiceState(pool, ProgramRunner(pool), token)
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
    body = await _body(request, wire.RunCodeRequest)
    try:
        return _json(await request.app[STATE].runner.run_code(body))
    except WorkerFault as fault:
        _log.error("run_code failed: %s", fault)
        return _json(wire.RunCodeResponse(status=wire.RunStatus.SANDBOX_ERROR, message=str(fault)))


async def submit(request: web.Request) -> web.Response:
    """Judge one completion; a fault of ours is a 500, never a failed verdict."""
    return _json(await grade(request.app[STATE].runner, await _body(request, wire.SubmitRequest)))


async def datasets(request: web.Request) -> web.Response:
    """The data set kinds that ``/submit`` judges."""
    return web.json_response(sorted(READERS))


async def ping(request: web.Request) -> web.Response:
    """``pong``, or 503 while the service ends; headers name the isolation reached."""
    state = request.app[STATE]
    if state.draining:
        return _busy("the service is shutting down")
    reached = state.pool.isolation
    headers = {
        "X-Sandbox-Isolation": str(reached.get("tier", "starting")),
        wire.LEVEL_HEADER: str(reached.get("level", "starting")),
    }
    return web.json_response("pong", headers=headers)


async def metrics(request: web.Request) -> web.Response:
    """Counters and durations in Prometheus' text format."""
    state = request.app[STATE]
    pool, done = state.pool, state.pool.counters
    shown = [
        ("counter", "sandbox_jobs_total", "Jobs that workers ran.", done.executions),
        ("counter", "sandbox_job_timeouts_total", "Jobs out of time.", done.timeouts),
        ("counter", "sandbox_worker_faults_total", "Workers that failed.", done.faults),
        ("counter", "sandbox_worker_restarts_total", "Workers replaced.", done.restarts),
        ("counter", "sandbox_broken_total", "Programs judged to break workers.", done.broken),
        ("counter", "sandbox_cancelled_total", "Jobs whose client left.", done.cancelled),
        ("histogram", "sandbox_queue_seconds", "Wait for a worker.", pool.queue_seconds),
        ("histogram", "sandbox_job_seconds", "Time on a worker.", pool.job_seconds),
        ("gauge", "sandbox_workers", "Workers.", pool.size),
        ("gauge", "sandbox_workers_free", "Workers without a job.", pool.queue.free),
        ("gauge", "sandbox_queue_length", "Jobs that wait.", pool.queue.waiting),
        ("gauge", "sandbox_clients_waiting", "Clients with a job waiting.", pool.queue.clients),
        ("gauge", "sandbox_requests_running", "Requests in work.", state.running),
        ("gauge", "sandbox_requests_bytes", "What they may hold.", state.held),
        ("gauge", "sandbox_draining", "1 while the service ends.", state.draining),
    ]
    lines = list(state.telemetry.lines())
    for kind, name, text, value in shown:
        lines += metric_lines(kind, name, text, ({}, value))
    if reached := pool.isolation:
        labels = {key: str(reached[key]) for key in ("level", "tier", "seccomp", "landlock")}
        labels["cgroups"] = " ".join(reached["cgroups"])
        text = "Isolation that programs run in."
        lines += metric_lines("gauge", "sandbox_isolation_info", text, (labels, 1))
    body = "\n".join([*lines, ""]).encode()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def stats(request: web.Request) -> web.Response:
    """Counters since the start, the queue's length now, and the isolation reached."""
    pool = request.app[STATE].pool
    return web.json_response(
        {
            "queue_length": pool.queue.waiting,
            "workers": pool.size,
            **asdict(pool.counters),
            "isolation": pool.isolation,
        }
    )


async def status(request: web.Request) -> web.Response:
    """What this service is; ``identity`` is all of it that may change a verdict."""
    pool = request.app[STATE].pool
    settings, reached = pool.settings, pool.isolation
    identity = {
        "grader": wire.GRADER_VERSION,
        "isolation": {key: reached.get(key) for key in ("level", "tier", "seccomp", "cgroups")},
        "limits": asdict(settings.limits),
        "python": settings.python,
        "preload": settings.preload,
    }
    note = {"service": "ctrl_megatron sandbox", "isolation": reached, "identity": identity}
    return web.json_response(note)


@web.middleware
async def _count(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: count, time and log every answer; errors become JSON."""
    started, status = time.perf_counter(), 499
    try:
        response = await _answer(request, handler)
        status = response.status
        return response
    finally:
        # 499: the client left before the answer.
        seconds = time.perf_counter() - started
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        request.app[STATE].telemetry.add(route, status, seconds)
        if _log.isEnabledFor(logging.INFO):
            fields = {
                "route": route,
                "status": status,
                "seconds": round(seconds, 6),
                "client": _client(request),
            }
            _log.info("request", extra={"fields": fields})


@web.middleware
async def _admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The token, then the refusal of new work while draining."""
    state = request.app[STATE]
    authorization = request.headers.get("Authorization", "")
    if request.path not in OPEN_ROUTES and not is_allowed(authorization, state.token):
        return _refusal(401, "this service wants its bearer token", {"WWW-Authenticate": "Bearer"})
    if request.method != "POST":
        return await handler(request)
    if state.draining:
        return _busy("the service is shutting down")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() != "identity":
        # It would hold more memory than the length that it declares.
        return _refusal(415, f"the body is packed ({encoding[:_CLIENT_LENGTH]}): send it as it is")
    limits, size = state.pool.settings.limits, request.content_length
    # A body of unknown length may be as long as any. Text takes up to four bytes a character.
    size = 4 * VERDICT_CHARACTERS + (limits.request_bytes if size is None else size)
    if state.held + size > limits.service_mb << 20 and state.running:
        return _busy(f"the requests in work hold {state.held >> 20} MiB")
    CURRENT_CLIENT.set(_client(request))
    CURRENT_REQUEST.set(next(state.arrivals))
    state.running += 1
    state.held += size
    try:
        return await handler(request)
    finally:
        state.running -= 1
        state.held -= size
        if state.running == 0 and state.draining:
            state.idle.set()


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False, include_input=False)
        return _refusal(422, detail)
    except ValueError as error:
        return _refusal(400, str(error))
    except QueueFull as error:
        return _busy(str(error))
    except WorkerFault as error:
        _log.error("%s failed: %s", request.path, error)
        return _refusal(500, str(error))
    except web.HTTPException as error:
        return _refusal(error.status, error.reason)
    except Exception as error:
        _log.exception("%s failed", request.path)
        return _refusal(500, f"{type(error).__name__}: {error}")


def _refusal(status: int, detail: object, headers: dict[str, str] | None = None) -> web.Response:
    """An error in the contract's form."""
    return web.json_response({"detail": detail}, status=status, headers=headers)


def _busy(detail: str) -> web.Response:
    """503: this request may be sent again, here or elsewhere."""
    return _refusal(503, detail, {"Retry-After": str(_RETRY_SECONDS)})


def _client(request: web.Request) -> str:
    """Whom to be fair to: the name that the client gives itself, else its address."""
    named = request.headers.get(wire.CLIENT_HEADER, "")[:_CLIENT_LENGTH]
    return named or (request.remote or "unknown")


async def _body(request: web.Request, kind: type[BodyT]) -> BodyT:
    seconds = request.app[STATE].pool.settings.limits.body_seconds
    try:
        async with asyncio.timeout(seconds):
            text = await request.read()
    except TimeoutError as error:
        reason = f"the request's body did not arrive within {seconds:g} s"
        raise web.HTTPRequestTimeout(reason=reason) from error
    if len(text) > CHECKED_BYTES:
        # Other requests go on meanwhile; the parser itself lets nobody else run.
        await aside(_check_values, text)
        return await aside(kind.model_validate_json, text)
    return kind.model_validate_json(text)


def _check_values(text: bytes) -> None:
    """Raise ``ValueError`` for JSON of so many values that reading it takes seconds."""
    values, at, quoted = 0, 0, False
    while at < len(text):
        end = at + CHECKED_BYTES
        while text[end - 1 : end] == b"\\":
            end += 1  # not between a backslash and what it escapes
        plain = text[at:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        for part in plain.split(b'"'):
            values += 0 if quoted else part.count(b",") + part.count(b":")
            quoted = not quoted
        quoted = not quoted
        at = end
        if values > JSON_VALUES:
            raise ValueError(f"the request holds more than {JSON_VALUES} JSON values")


def _json(record: BaseModel) -> web.Response:
    try:
        text = record.model_dump_json()
    except ValueError as error:
        # Ours to mend, not the request's fault.
        raise WorkerFault(f"the answer cannot be written as JSON: {error}") from error
    return web.Response(text=text, content_type="application/json")
