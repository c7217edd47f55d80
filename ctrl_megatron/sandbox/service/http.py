"""The HTTP service: SandboxFusion's routes over the pool of workers, and what every request passes
before: counting, errors as JSON, the token, the refusal of new work while the service ends.

A client may name its request (``wire.JOB_HEADER``). It then hears from the service while its work
waits or goes on, and may ask again without starting it anew.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from ctrl_megatron.problems.long_integers import loads
from ctrl_megatron.sandbox import wire
from ctrl_megatron.sandbox.access import is_allowed
from ctrl_megatron.sandbox.datasets import READERS
from ctrl_megatron.sandbox.limits import (
    CHECKED_BYTES,
    JSON_VALUES,
    MOST_WAIT_SECONDS,
    VERDICT_CHARACTERS,
)
from ctrl_megatron.sandbox.service.connections import Doorkeeper
from ctrl_megatron.sandbox.service.grading import grade
from ctrl_megatron.sandbox.service.programs import ProgramRunner
from ctrl_megatron.sandbox.service.reading import aside
from ctrl_megatron.sandbox.service.telemetry import CONTENT_TYPE, RequestTelemetry, metric_lines
from ctrl_megatron.sandbox.service.under_way import UnknownWork, Work, WorkUnderWay
from ctrl_megatron.sandbox.service.workers import (
    CURRENT_SHARE,
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
_JOB_NUMBER = re.compile(r"[0-9A-Za-z_-]{16,128}").fullmatch
_NETWORK_BITS = 64
"""Of an address of IPv6, which one machine has all addresses of."""
_log = logging.getLogger(__name__)


class Overloaded(RuntimeError):
    """The service holds as much as it may; the request may be sent again."""


@dataclass(slots=True)
class ServiceState:
    """What all requests share."""

    pool: WorkerPool
    runner: ProgramRunner
    token: str | None = None
    door: Doorkeeper | None = None
    """Of the connections that requests come through."""
    telemetry: RequestTelemetry = field(default_factory=RequestTelemetry)
    draining: bool = False
    """The service ends: running requests finish, new ones are refused."""
    arriving: int = 0
    """Requests whose body is on its way."""
    held: int = 0
    """Bytes of requests that have arrived, and of the verdicts on them at most."""
    works: WorkUnderWay = field(default_factory=WorkUnderWay)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last request has ended while the service drains."""

    def __post_init__(self) -> None:
        self.works.on_change = self.look_if_idle

    @property
    def running(self) -> int:
        """Requests that do work: POST."""
        return self.arriving + self.works.open

    def look_if_idle(self) -> None:
        """Tell who drains that nothing runs any more."""
        if self.running == 0 and self.draining:
            self.idle.set()

    def hold(self, size: int) -> None:
        """Hold ``size`` bytes more. Raises ``Overloaded``; a single request is always taken."""
        if self.held and self.held + size > self.pool.settings.limits.service_mb << 20:
            raise Overloaded(f"the requests in work hold {self.held >> 20} MiB")
        self.held += size

    @contextmanager
    def arrival(self) -> Iterator[None]:
        """The body of a request is on its way."""
        self.arriving += 1
        try:
            yield
        finally:
            self.arriving -= 1
            self.look_if_idle()

    async def drain(self, seconds: float) -> None:
        """Refuse new work and wait for the running, at most ``seconds``."""
        self.draining = True
        if self.running:
            try:
                await asyncio.wait_for(self.idle.wait(), seconds)
            except TimeoutError:
                return


STATE = web.AppKey("state", ServiceState)


def build_app(
    pool: WorkerPool, *, token: str | None = None, door: Doorkeeper | None = None
) -> web.Application:
    """The application over a started pool; with ``token`` it wants that bearer token. ``door`` is
    told of every request whether it waits for its client.
    """
    app = web.Application(middlewares=[_count, _admit])
    app[STATE] = ServiceState(pool, ProgramRunner(pool), token, door)
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
    """Run one program; a fault of ours is a 200 with ``SandboxError``, as the contract has it."""
    runner = request.app[STATE].runner
    try:
        return await _work(request, wire.RunCodeRequest, runner.run_code)
    except WorkerFault as fault:
        return _sandbox_error(fault)


async def submit(request: web.Request) -> web.Response:
    """Judge one completion; a fault of ours is a 500, never a failed verdict."""
    runner = request.app[STATE].runner
    return await _work(request, wire.SubmitRequest, lambda body: grade(runner, body))


async def job(request: web.Request) -> web.Response:
    """The answer to a request that was sent before, or 202 while there is none."""
    works = request.app[STATE].works
    try:
        return await _answer_of(request, works.find(request.match_info["number"]))
    except UnknownWork as error:
        return _refusal(404, str(error.args[0]))


async def give_up(request: web.Request) -> web.Response:
    """End the work of a request that was sent before; 204 whether or not there is any."""
    works = request.app[STATE].works
    with suppress(UnknownWork):
        works.give_up(works.find(request.match_info["number"]))
    return web.Response(status=204)


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
        ("gauge", "sandbox_clients_waiting", "Addresses with a job waiting.", pool.queue.peers),
        ("gauge", "sandbox_requests_running", "Requests in work.", state.running),
        ("gauge", "sandbox_requests_bytes", "What they may hold.", state.held),
        ("gauge", "sandbox_connections", "Open connections.", state.door.open if state.door else 0),
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
    door, transport = request.app[STATE].door, request.transport
    if door is not None:
        door.headed(transport)
        if request.method != "POST":
            door.served(transport)
    try:
        response = await _answer(request, handler)
        status = response.status
        if door is not None and door.answered(transport):
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
    """An error in the contract's form."""
    return web.json_response({"detail": detail}, status=status, headers=headers)


def _busy(detail: str) -> web.Response:
    """503: this request may be sent again, here or elsewhere."""
    return _refusal(503, detail, {"Retry-After": str(_RETRY_SECONDS)})


def _client(request: web.Request) -> str:
    """Who it is for the log: the name that the client gives itself, else its address."""
    named = request.headers.get(wire.CLIENT_HEADER, "")[:_CLIENT_LENGTH]
    return named or (request.remote or "unknown")


def peer_of(address: str | None) -> str:
    """Whom to be fair to: where a request comes from, which its sender cannot choose at will."""
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
    """Do what a request of ``kind`` asks for, or join who does it already."""
    state = request.app[STATE]
    number = request.headers.get(wire.JOB_HEADER, "")
    if number and not _JOB_NUMBER(number):
        return _refusal(400, f"{wire.JOB_HEADER} must be 16 to 128 letters, digits, - or _")
    with state.arrival():
        body = await _body(request)
        CURRENT_SHARE.set(state.pool.queue.enter(peer_of(request.remote)))

        async def answer() -> str:
            # Text takes up to four bytes a character.
            size = len(body) + 4 * VERDICT_CHARACTERS
            state.hold(size)
            try:
                return _text(await do(await _parsed(body, kind)))
            finally:
                state.held -= size

        work = state.works.begin(number, body, answer)
    return await _answer_of(request, work)


async def _answer_of(request: web.Request, work: Work) -> web.Response:
    """What came of the work, or 202 when the client does not want to wait longer."""
    works, seconds = request.app[STATE].works, None
    if work.named:
        asked = request.headers.get(wire.WAIT_HEADER, "")
        wanted = float(asked) if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", asked) else MOST_WAIT_SECONDS
        seconds = min(wanted, MOST_WAIT_SECONDS)
    text = await works.wait(work, seconds)
    if text is None:
        where = f"/jobs/{work.number}"
        return web.json_response({"detail": "under way"}, status=202, headers={"Location": where})
    return web.Response(text=text, content_type="application/json")


async def _body(request: web.Request) -> bytes:
    """The request's body, counted as it arrives: what is declared and never sent holds nothing."""
    state, parts, size = request.app[STATE], list[bytes](), 0
    limits = state.pool.settings.limits
    too_large = web.HTTPRequestEntityTooLarge(max_size=limits.request_bytes, actual_size=size)
    if (request.content_length or 0) > limits.request_bytes:
        raise too_large
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.content.iter_any():
                state.hold(len(part))
                size += len(part)
                parts.append(part)
                if size > limits.request_bytes:
                    raise too_large
    except TimeoutError as error:
        reason = f"the request's body did not arrive within {limits.body_seconds:g} s"
        raise web.HTTPRequestTimeout(reason=reason) from error
    finally:
        state.held -= size
    if state.door is not None:
        state.door.served(request.transport)
    return b"".join(parts)


async def _parsed(body: bytes, kind: type[BodyT]) -> BodyT:
    if len(body) > CHECKED_BYTES:
        # Other requests go on meanwhile; the parser itself lets nobody else run.
        await aside(_check_values, body)
        return await aside(_read_json, body, kind)
    return _read_json(body, kind)


def _read_json(body: bytes, kind: type[BodyT]) -> BodyT:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        # Pydantic's parser stops at integers of 4,300 digits.
        if "number out of range" not in str(error):
            raise
    return kind.model_validate(loads(body))


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


def _text(record: BaseModel) -> str:
    try:
        return record.model_dump_json()
    except ValueError as error:
        # Ours to mend, not the request's fault.
        raise WorkerFault(f"the answer cannot be written as JSON: {error}") from error


def _sandbox_error(fault: WorkerFault) -> web.Response:
    _log.error("run_code failed: %s", fault)
    record = wire.RunCodeResponse(status=wire.RunStatus.SANDBOX_ERROR, message=str(fault))
    return web.Response(text=_text(record), content_type="application/json")
