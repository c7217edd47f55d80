"""State that all requests share, and the reading of a request's body within its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from ctrl_megatron.problems.long_integers import load_long_integer_json
from ctrl_megatron.sandbox.limits import CHECKED_BYTES
from ctrl_megatron.sandbox.service.connections import ConnectionListener
from ctrl_megatron.sandbox.service.programs import ProgramRunner
from ctrl_megatron.sandbox.service.reading import run_in_reading_thread
from ctrl_megatron.sandbox.service.telemetry import RequestTelemetry
from ctrl_megatron.sandbox.service.under_way import WorkUnderWay
from ctrl_megatron.sandbox.service.workers import WorkerPool
from ctrl_megatron.sandbox.task import require_few_values

BodyT = TypeVar("BodyT", bound=BaseModel)


class Overloaded(RuntimeError):
    """The service has as many requests in memory as it may; the request may be sent again."""


@dataclass(slots=True)
class ServiceState:
    """State that all requests share."""

    pool: WorkerPool
    runner: ProgramRunner
    token: str | None = None
    loopback: bool = False
    """Whether the service listens on loopback."""
    listener: ConnectionListener | None = None
    """Manages the connections of the requests."""
    telemetry: RequestTelemetry = field(default_factory=RequestTelemetry)
    draining: bool = False
    """The service is ending: running requests finish, new ones are refused."""
    arriving: int = 0
    """Requests whose body is arriving."""
    held: int = 0
    """Bytes of the requests that have arrived, plus an upper bound for their verdicts."""
    works: WorkUnderWay = field(default_factory=WorkUnderWay)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last request has ended while the service drains."""

    def __post_init__(self) -> None:
        self.works.on_change = self.set_idle_if_drained

    @property
    def running_request_count(self) -> int:
        """Number of POST requests in progress."""
        return self.arriving + self.works.open

    def set_idle_if_drained(self) -> None:
        """Set ``idle`` if the service drains and no request is in progress."""
        if self.running_request_count == 0 and self.draining:
            self.idle.set()

    def reserve_bytes(self, size: int) -> None:
        """Count ``size`` more bytes. Raises ``Overloaded``, but never for a single request."""
        if self.held and self.held + size > self.pool.settings.limits.service_mb << 20:
            raise Overloaded(f"the requests in progress occupy {self.held >> 20} MiB")
        self.held += size

    @contextmanager
    def count_arriving_request(self) -> Iterator[None]:
        """Count a request whose body is arriving."""
        self.arriving += 1
        try:
            yield
        finally:
            self.arriving -= 1
            self.set_idle_if_drained()

    async def drain(self, seconds: float) -> None:
        """Refuse new work and wait at most ``seconds`` for running requests."""
        self.draining = True
        if self.running_request_count:
            try:
                await asyncio.wait_for(self.idle.wait(), seconds)
            except TimeoutError:
                return


STATE = web.AppKey("state", ServiceState)


async def read_body(request: web.Request) -> bytes:
    """Read the request's body. Bytes are counted as they arrive, not by the declared length."""
    state, parts, size = request.app[STATE], list[bytes](), 0
    limits = state.pool.settings.limits
    too_large = web.HTTPRequestEntityTooLarge(max_size=limits.request_bytes, actual_size=size)
    if (request.content_length or 0) > limits.request_bytes:
        raise too_large
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.content.iter_any():
                state.reserve_bytes(len(part))
                size += len(part)
                parts.append(part)
                if size > limits.request_bytes:
                    raise too_large
    except TimeoutError as error:
        reason = f"the request's body did not arrive within {limits.body_seconds:g} s"
        raise web.HTTPRequestTimeout(reason=reason) from error
    finally:
        state.held -= size
    if state.listener is not None:
        state.listener.request_received(request.transport)
    return b"".join(parts)


async def parse_body(body: bytes, kind: type[BodyT]) -> BodyT:
    """The record of a body. Raises ``ValidationError``, or ``ValueError`` for too many values."""
    if len(body) > CHECKED_BYTES:
        # Checked and parsed in another thread, but the parser itself blocks all threads, so its
        # input must be small.
        await run_in_reading_thread(require_few_values, body)
        return await run_in_reading_thread(_read_json, body, kind)
    return _read_json(body, kind)


def _read_json(body: bytes, kind: type[BodyT]) -> BodyT:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        # Pydantic's parser refuses integers of more than 4,300 digits.
        if "number out of range" not in str(error):
            raise
    return kind.model_validate(load_long_integer_json(body))
