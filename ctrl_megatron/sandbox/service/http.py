"""The HTTP service: SandboxFusion's routes over the pool of workers. Every request passes through
counting, errors as JSON, the token, and the refusal of new work while the service ends.

A client may name its request (``wire.JOB_HEADER``). The service then answers at intervals while the
work waits or runs, and the client may ask again without starting it anew.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict

from aiohttp import web
from pydantic import BaseModel, ValidationError

from ctrl_megatron.exposition import CONTENT_TYPE, metric_lines
from ctrl_megatron.sandbox import wire
from ctrl_megatron.sandbox.access import cross_site_refusal, is_allowed
from ctrl_megatron.sandbox.datasets import READERS
from ctrl_megatron.sandbox.limits import MOST_WAIT_SECONDS, VERDICT_CHARACTERS
from ctrl_megatron.sandbox.service.connections import ConnectionListener
from ctrl_megatron.sandbox.service.grading import grade_submission
from ctrl_megatron.sandbox.service.programs import ProgramRunner
from ctrl_megatron.sandbox.service.requests import (
    STATE,
    BodyT,
    Overloaded,
    ServiceState,
    parse_body,
    read_body,
)
from ctrl_megatron.sandbox.service.under_way import UnknownWork, Work
from ctrl_megatron.sandbox.service.worker import WorkerFault
from ctrl_megatron.sandbox.service.workers import CURRENT_SHARE, QueueFull, WorkerPool

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN_ROUTES = ("/v1/ping",)
"""Routes that need no token, for health checks."""
_RETRY_SECONDS = 2
_CLIENT_LENGTH = 128
_JOB_NUMBER = re.compile(r"[0-9A-Za-z_-]{16,128}").fullmatch
_NETWORK_BITS = 64
"""Prefix length of an IPv6 network; one machine owns all addresses of it."""
_log = logging.getLogger(__name__)


def build_app(
    pool: WorkerPool,
    *,
    token: str | None = None,
    loopback: bool = False,
    listener: ConnectionListener | None = None,
) -> web.Application:
    """Create the application over a started pool. With ``token`` clients must send that bearer
    token; without, no request that a web page can send is answered (``cross_site_refusal``).
    ``listener`` is notified whether each request waits for its client.
    """
    app = web.Application(middlewares=[_count, _admit])
    app[STATE] = ServiceState(pool, ProgramRunner(pool), token, loopback, listener)
    app.router.add_post("/run_code", run_code)
    app.router.add_post("/submit", submit)
    app.router.add_get("/jobs/{number}", job)
    app.router.add_delete("/jobs/{number}", give_up)
    app.router.add_get("/list_datasets", datasets)
    app.router.add_get("/v1/ping", ping)
    app.router.add_get("/stats", stats)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/", status)
    return app


async def run_code(request: web.Request) -> web.Response:
    """Run one program. A fault of the service is answered 200 with ``SandboxError``, as the
    contract requires.
    """
    runner = request.app[STATE].runner
    try:
        return await _work(request, wire.RunCodeRequest, runner.run_code)
    except WorkerFault as fault:
        return _sandbox_error(fault)


async def submit(request: web.Request) -> web.Response:
    """Judge one completion. A fault of the service is answered 500, never as a failed verdict."""
    runner = request.app[STATE].runner
    return await _work(request, wire.SubmitRequest, lambda body: grade_submission(runner, body))


async def job(request: web.Request) -> web.Response:
    """The answer to an earlier request, or 202 if there is none yet."""
    works = request.app[STATE].works
    try:
        return await _answer_of(request, works.find(request.match_info["number"]))
    except UnknownWork as error:
        return _refusal(404, str(error.args[0]))


async def give_up(request: web.Request) -> web.Response:
    """End the work of an earlier request; always answers 204."""
    works = request.app[STATE].works
    with suppress(UnknownWork):
        works.give_up(works.find(request.match_info["number"]))
    return web.Response(status=204)


async def datasets(request: web.Request) -> web.Response:
    """The data set kinds that ``/submit`` judges."""
    return web.json_response(sorted(READERS))


async def ping(request: web.Request) -> web.Response:
    """Answer ``pong``, or 503 while the service ends; headers name the isolation reached."""
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
        ("gauge", "sandbox_workers_free", "Workers without a job.", pool.queue.free_item_count),
        ("gauge", "sandbox_queue_length", "Jobs that wait.", pool.queue.waiting),
        (
            "gauge",
            "sandbox_clients_waiting",
            "Addresses with a job waiting.",
            pool.queue.waiting_peer_count,
        ),
        ("gauge", "sandbox_requests_running", "Requests in progress.", state.running_request_count),
        ("gauge", "sandbox_requests_bytes", "Bytes that they may occupy.", state.held),
        (
            "gauge",
            "sandbox_connections",
            "Open connections.",
            state.listener.open_connection_count if state.listener else 0,
        ),
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
    """Counters since the start, the current length of the queue, and the isolation reached."""
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
    """Describe this service. ``identity`` contains everything that may change a verdict."""
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
    """Outermost middleware: counts, times and logs every answer, and turns errors into JSON."""
    started, status = time.perf_counter(), 499
    listener, transport = request.app[STATE].listener, request.transport
    if listener is not None:
        listener.head_received(transport)
        if request.method != "POST":
            listener.request_received(transport)
    try:
        response = await _answer(request, handler)
        status = response.status
        if listener is not None and listener.request_answered(transport):
            response.force_close()
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
    """Check the token, or without one who may have sent the request, then refuse new work while the
    service drains.
    """
    state = request.app[STATE]
    if state.token is None:
        sent = request.host, request.method, request.content_type
        if foreign := cross_site_refusal(*sent, loopback=state.loopback):
            return _refusal(*foreign)
    authorization = request.headers.get("Authorization", "")
    if request.path not in OPEN_ROUTES and not is_allowed(authorization, state.token):
        return _refusal(
            401, "this service requires its bearer token", {"WWW-Authenticate": "Bearer"}
        )
    if request.method != "POST":
        return await handler(request)
    if state.draining:
        return _busy("the service is shutting down")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() != "identity":
        # It would take more memory than its declared length.
        return _refusal(
            415, f"the body is compressed ({encoding[:_CLIENT_LENGTH]}): send it as it is"
        )
    return await handler(request)


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False, include_input=False)
        return _refusal(422, detail)
    except ValueError as error:
        return _refusal(400, str(error))
    except (QueueFull, Overloaded) as error:
        response = _busy(str(error))
        response.headers[wire.BUSY_HEADER] = "1"
        response.headers[wire.FINISHED_HEADER] = _finished(request)
        return response
    except WorkerFault as error:
        _log.error("%s failed: %s", request.path, error)
        return _refusal(500, str(error))
    except web.HTTPException as error:
        return _refusal(error.status, error.reason)
    except Exception as error:
        _log.exception("%s failed", request.path)
        return _refusal(500, f"{type(error).__name__}: {error}")


def _refusal(status: int, detail: object, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"detail": detail}, status=status, headers=headers)


def _busy(detail: str) -> web.Response:
    """Answer 503: the request may be sent again, here or to another service."""
    return _refusal(503, detail, {"Retry-After": str(_RETRY_SECONDS)})


def _client(request: web.Request) -> str:
    """The client's name for the log: the name that it sends, else its address."""
    named = request.headers.get(wire.CLIENT_HEADER, "")[:_CLIENT_LENGTH]
    return named or (request.remote or "unknown")


def fairness_peer(address: str | None) -> str:
    """The peer of an address, for fairness between peers. It depends only on the address, which a
    sender cannot choose at will.
    """
    try:
        parsed = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return "unknown"
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    parsed = mapped or parsed
    if parsed.is_loopback:
        return "loopback"
    if parsed.version == 6:
        return str(ipaddress.ip_network((parsed, _NETWORK_BITS), strict=False))
    return str(parsed)


async def _work(
    request: web.Request, kind: type[BodyT], do: Callable[[BodyT], Awaitable[BaseModel]]
) -> web.Response:
    """Do the work of a request of ``kind``, or join it if it is running already."""
    state = request.app[STATE]
    number = request.headers.get(wire.JOB_HEADER, "")
    if number and not _JOB_NUMBER(number):
        return _refusal(400, f"{wire.JOB_HEADER} must be 16 to 128 letters, digits, - or _")
    with state.count_arriving_request():
        body = await read_body(request)
        CURRENT_SHARE.set(state.pool.queue.register_request(fairness_peer(request.remote)))

        async def answer() -> str:
            # A character takes up to four bytes.
            size = len(body) + 4 * VERDICT_CHARACTERS
            state.reserve_bytes(size)
            try:
                return _text(await do(await parse_body(body, kind)))
            finally:
                state.held -= size

        work = state.works.begin_or_join(number, body, answer)
    return await _answer_of(request, work)


async def _answer_of(request: web.Request, work: Work) -> web.Response:
    """The result of the work, or 202 when the client's waiting time is over."""
    works, seconds = request.app[STATE].works, None
    if work.named:
        asked = request.headers.get(wire.WAIT_HEADER, "")
        wanted = float(asked) if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", asked) else MOST_WAIT_SECONDS
        seconds = min(wanted, MOST_WAIT_SECONDS)
    text = await works.wait(work, seconds)
    if text is None:
        told = {"Location": f"/jobs/{work.number}", wire.FINISHED_HEADER: _finished(request)}
        return web.json_response({"detail": "under way"}, status=202, headers=told)
    return web.Response(text=text, content_type="application/json")


def _finished(request: web.Request) -> str:
    state = request.app[STATE]
    return str(state.works.finished + state.pool.counters.executions)


def _text(record: BaseModel) -> str:
    try:
        return record.model_dump_json()
    except ValueError as error:
        # A fault of the service, not of the request.
        raise WorkerFault(f"the answer cannot be written as JSON: {error}") from error


def _sandbox_error(fault: WorkerFault) -> web.Response:
    _log.error("run_code failed: %s", fault)
    record = wire.RunCodeResponse(status=wire.RunStatus.SANDBOX_ERROR, message=str(fault))
    return web.Response(text=_text(record), content_type="application/json")
