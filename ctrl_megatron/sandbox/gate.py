"""What every request passes: errors as JSON, counting, the token, and the refusal of new work while
the service ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web
from pydantic import ValidationError

from ctrl_megatron.sandbox.access import is_allowed
from ctrl_megatron.sandbox.telemetry import Telemetry
from ctrl_megatron.sandbox.turns import CLIENT, CLIENT_HEADER
from ctrl_megatron.sandbox.workers import QueueFull, WorkerFault

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN_ROUTES = ("/v1/ping",)
"""Answered without a token, for health checks."""
_RETRY_SECONDS = 2
_CLIENT_LENGTH = 128
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Gate:
    """State that all requests share."""

    token: str | None = None
    telemetry: Telemetry = field(default_factory=Telemetry)
    draining: bool = False
    """The service ends: running requests finish, new ones are refused."""
    running: int = 0
    """Requests that do work: POST."""
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)

    async def drain(self, seconds: float) -> bool:
        """Refuse new work and wait for the running; whether all of it ended in time."""
        self.draining = True
        if self.running == 0:
            return True
        try:
            await asyncio.wait_for(self._quiet.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def enter(self) -> None:
        """One more request does work."""
        self.running += 1

    def leave(self) -> None:
        """One less."""
        self.running -= 1
        if self.running == 0 and self.draining:
            self._quiet.set()


GATE = web.AppKey("gate", Gate)


@web.middleware
async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: count, time and log every answer; errors become JSON."""
    gate, started, status = request.app[GATE], time.perf_counter(), 499
    try:
        response = await _answer(request, handler)
        status = response.status
        return response
    finally:
        # 499: the client left before the answer.
        seconds = time.perf_counter() - started
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        gate.telemetry.add(route, status, seconds)
        if _log.isEnabledFor(logging.INFO):
            fields = {
                "route": route,
                "status": status,
                "seconds": round(seconds, 6),
                "client": _client(request),
            }
            _log.info("request", extra={"fields": fields})


@web.middleware
async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The token, then the refusal of new work while draining."""
    gate = request.app[GATE]
    authorization = request.headers.get("Authorization", "")
    if request.path not in OPEN_ROUTES and not is_allowed(authorization, gate.token):
        return refusal(401, "this service wants its bearer token", {"WWW-Authenticate": "Bearer"})
    if request.method != "POST":
        return await handler(request)
    if gate.draining:
        return busy("the service is shutting down")
    CLIENT.set(_client(request))
    gate.enter()
    try:
        return await handler(request)
    finally:
        gate.leave()


def refusal(status: int, detail: object, headers: dict[str, str] | None = None) -> web.Response:
    """An error in the contract's form."""
    return web.json_response({"detail": detail}, status=status, headers=headers)


def busy(detail: str) -> web.Response:
    """503: this request may be sent again, here or elsewhere."""
    return refusal(503, detail, {"Retry-After": str(_RETRY_SECONDS)})


def _client(request: web.Request) -> str:
    """Whom to be fair to: the name that the client gives itself, else its address."""
    named = request.headers.get(CLIENT_HEADER, "")[:_CLIENT_LENGTH]
    return named or (request.remote or "unknown")


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False, include_input=False)
        return refusal(422, detail)
    except ValueError as error:
        return refusal(400, str(error))
    except QueueFull as error:
        return busy(str(error))
    except WorkerFault as error:
        _log.error("%s failed: %s", request.path, error)
        return refusal(500, str(error))
    except web.HTTPException as error:
        return refusal(error.status, error.reason)
    except Exception as error:
        _log.exception("%s failed", request.path)
        return refusal(500, f"{type(error).__name__}: {error}")
