"""Asynchronous client of the sandbox service (this package's or SandboxFusion).

A fault of the service is retried and then raised; a fault of the user's program is a result. Every
call has a number. The service reports at intervals that its work continues, so that a call which
waits for its turn does not time out, and an attempt after a broken connection joins the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from ctrl_megatron.errors import UserError
from ctrl_megatron.sandbox import wire
from ctrl_megatron.sandbox.access import split_credentials
from ctrl_megatron.sandbox.client.attempts import (
    CONNECTION_FAILURES,
    SilenceDeadline,
    backoff_seconds,
    describe_failure,
    is_temporary,
    retry,
    retry_after,
)

AnswerT = TypeVar("AnswerT", bound=BaseModel)

_JSON = {"Content-Type": "application/json"}
_UNAVAILABLE = (502, 503, 504)
_REFUSED = (400, 413, 422)
"""Answers that concern the request, not the service's address or token."""
_SILENCE_SECONDS = 640.0
_CHECK_SECONDS = 30.0
_CHECK_PAUSE_SECONDS = 1.0
_STATS_SECONDS = 2.0
_UNDER_WAY, _LOST = 202, 404
_WAIT_SECONDS = 20.0
_WAITS_OF_TIMEOUT = 4
"""The service reports this often within the time-out of one attempt."""
_WITHDRAWAL_SECONDS = 5.0


class SandboxError(RuntimeError):
    """The sandbox itself failed after every retry; nothing is known about the program."""


class RequestRefused(UserError):
    """The sandbox judges no program on this request: its tests cannot be judged, or are too large.
    Another request may be answered.
    """


class SandboxSilent(SandboxError):
    """The sandbox has shown no sign of life for the whole time that the client allows."""


class _Fault(Exception):
    """One attempt failed because of the service. Another attempt may succeed, after at least
    ``retry_after`` seconds at the same service.
    """

    def __init__(self, text: str, retry_after: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class _Busy(_Fault):
    """The service is full of other requests. Waiting for it does not count as a failed attempt."""


@dataclass(slots=True)
class ClientCounters:
    """Counters of a client's calls."""

    requests: int = 0
    """Calls of ``run_code`` and ``submit``."""
    retries: int = 0
    """Attempts beyond the first of each call."""
    failures: int = 0
    """Calls that ended in ``SandboxError``."""


@dataclass(slots=True)
class _Endpoint:
    """The client's view of one service."""

    url: str
    headers: dict[str, str]
    in_flight: int = 0
    """This client's requests in progress."""
    healthy: bool = True
    """False after a failed connection, until the service answers a health check."""
    finished: str = ""
    """Its last count of finished work, as text (``FINISHED_HEADER``)."""
    advanced: float = -math.inf
    """When it last finished a request of this client, or said that it had finished other work
    (``time.monotonic``)."""

    def goes_on(self, status: int, headers: Mapping[str, str], seconds: float) -> bool:
        """Whether a response with ``status`` and ``headers`` is a sign of life. A service that only
        puts requests off, and has finished no work for ``seconds``, is as good as silent.
        """
        now, busy = time.monotonic(), wire.BUSY_HEADER in headers
        finished = headers.get(wire.FINISHED_HEADER, self.finished)
        if finished != self.finished or (status < 500 and status != _UNDER_WAY):
            self.advanced = now
        self.finished = finished
        return (status < 500 or busy) and now - self.advanced < seconds


class SandboxClient:
    """Client of one or several services. Each attempt goes to the least loaded service that is
    healthy and that this call has not tried. A service that cannot be reached gets no request until
    it answers a health check.

    The client binds to the event loop of its first call, which may run in any thread. ``endpoint``
    is one address, a sequence of addresses, or several in one text, separated by commas.
    ``timeout`` is the number of seconds that a service may be silent; for a service that does not
    report progress it limits the whole answer. A call is given up after ``silence`` seconds without
    a sign of life, all attempts together (``SandboxSilent``); by default twice ``timeout``. That a
    service is busy or still at work is a sign of life only if it has finished a request of this
    client or, by what it says, any job, within the last ``silence`` seconds.
    ``backoff`` is the first pause between attempts in seconds (doubled each time up to 60 s, with
    jitter; no pause if another service is left to try).
    ``max_concurrency`` limits the requests on the wire; a request that waits for its retry does not
    count. ``token`` is the services' bearer token. ``name`` appears in the services' logs (random
    by default).
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        *,
        timeout: float | None = None,
        silence: float | None = None,
        attempts: int = 5,
        max_concurrency: int = 256,
        backoff: float = 1.0,
        token: str | None = None,
        name: str | None = None,
    ) -> None:
        texts = endpoint.split(",") if isinstance(endpoint, str) else endpoint
        bearer = None if token is None else f"Bearer {token}"
        try:
            services = dict(split_credentials(text.strip().rstrip("/"), bearer) for text in texts)
        except ValueError as error:
            raise ValueError(
                f"sandbox endpoint must be one or more http:// URLs: {error}"
            ) from error
        if not services:
            raise ValueError("sandbox endpoint must be one or more http:// URLs, got none")
        self._services = [_Endpoint(url, headers) for url, headers in services.items()]
        if attempts < 1 or max_concurrency < 1:
            raise ValueError("attempts and max_concurrency must be at least 1")
        self.counters = ClientCounters()
        self._headers = {wire.CLIENT_HEADER: name or secrets.token_hex(8)}
        timeout = timeout or (silence or _SILENCE_SECONDS) / 2
        self._timeout, self._silence = timeout, silence or 2 * timeout
        self._silent = False
        """Whether the last news from the services is that a call was given up."""
        wait = min(_WAIT_SECONDS, timeout / _WAITS_OF_TIMEOUT)
        self._wait = {wire.WAIT_HEADER: f"{wait:.3f}"}
        self._attempts = attempts
        self._backoff = backoff
        self._limit = max_concurrency
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(max_concurrency)
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._withdrawing: set[asyncio.Task[None]] = set()

    async def run_code(self, request: wire.RunCodeRequest) -> wire.RunCodeResponse:
        """Run a program. Raises ``SandboxError`` (fault of the service) or ``ValueError``:
        ``RequestRefused`` for a bad request, ``UserError`` for a wrong address or token.
        """
        return await self._call("/run_code", request, wire.RunCodeResponse)

    async def submit(self, request: wire.SubmitRequest) -> wire.EvalResult:
        """Judge a completion. Raises ``SandboxError`` or ``ValueError`` like ``run_code``."""
        return await self._call("/submit", request, wire.EvalResult)

    async def isolation_levels(self) -> dict[str, str]:
        """The isolation level of each service by its address, empty for a service that does not
        report it.

        Raises ``SandboxError`` naming a service that does not answer.
        """
        levels = {}
        for service in self._services:
            trouble, levels[service.url] = await self._health(service)
            if trouble:
                raise SandboxError(f"sandbox {service.url} {trouble}")
        return levels

    async def queue_lengths(self) -> dict[str, int]:
        """The jobs that wait for a worker at each service, by its address. A service that does not
        report it (SandboxFusion), or does not answer now, is left out.
        """
        found = {}
        for service in self._services:
            limit = aiohttp.ClientTimeout(total=_STATS_SECONDS)
            asking = self._open_session().get(
                service.url + "/stats", headers=service.headers, timeout=limit
            )
            with contextlib.suppress(*CONNECTION_FAILURES, ValueError, LookupError, TypeError):
                async with asking as response:
                    found[service.url] = int((await response.json())["queue_length"])
        return found

    async def identity(self) -> list[Any]:
        """Everything about the services that may change a verdict, for caches of verdicts: limits,
        isolation, interpreter and grader of each, equal ones once.

        Raises ``SandboxError`` naming a service that does not report it.
        """
        said = [await self._identity_of(service) for service in self._services]
        return [json.loads(text) for text in sorted({json.dumps(item) for item in said})]

    async def _identity_of(self, service: _Endpoint) -> Any:
        async def ask() -> Any:
            limit = aiohttp.ClientTimeout(total=_CHECK_SECONDS)
            answer = self._open_session().get(
                service.url + "/", headers=service.headers, timeout=limit
            )
            async with answer as response:
                return (await response.json())["identity"]

        failures = (*CONNECTION_FAILURES, ValueError, LookupError, TypeError)
        try:
            return await retry(
                ask,
                lambda error: 0.0 if isinstance(error, failures) else None,
                attempts=self._attempts,
                backoff=self._backoff,
            )
        except failures as error:
            text = f"sandbox {service.url} does not report its identity: {describe_failure(error)}"
            raise SandboxError(text) from error

    async def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        self._slots = asyncio.Semaphore(self._limit)
        checks, self._checks = list(self._checks.values()), {}
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, *self._withdrawing, return_exceptions=True)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._limit)
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timeout),
                connector=connector,
                headers=self._headers,
            )
        return self._session

    async def _call(self, path: str, request: BaseModel, answer: type[AnswerT]) -> AnswerT:
        self.counters.requests += 1
        tried: set[str] = set()
        body, number = request.model_dump_json().encode(), secrets.token_hex(16)
        failed, silence = 0, SilenceDeadline(self._silence)
        while True:
            try:
                return await self._attempt(path, body, number, answer, tried, silence)
            except _Fault as fault:
                failed += not isinstance(fault, _Busy)
                if not silence.seconds_left:
                    self.counters.failures += 1
                    self._silent = True
                    text = f"{fault} (given up, as it has shown no sign of life in time)"
                    raise SandboxSilent(text) from fault
                if failed == self._attempts:
                    self.counters.failures += 1
                    text = f"{fault} (gave up after {self._attempts} attempts)"
                    raise SandboxError(text) from fault
                self.counters.retries += 1
                if any(service.healthy and service.url not in tried for service in self._services):
                    continue
                # Every service was tried: start again after a pause.
                tried.clear()
                again = backoff_seconds(max(failed - 1, 0), self._backoff)
                await asyncio.sleep(min(max(again, fault.retry_after), silence.seconds_left))

    async def _attempt(
        self,
        path: str,
        body: bytes,
        number: str,
        answer: type[AnswerT],
        tried: set[str],
        silence: SilenceDeadline,
    ) -> AnswerT:
        queued = time.monotonic()
        async with self._slots:
            # Waiting for this client's other requests is no silence of the service.
            silence.extend(time.monotonic() - queued)
            if self._silent:
                # Thousands of requests, a few at a time, must not each wait as long as the first.
                silence.cap_seconds_left(_CHECK_SECONDS)
            # The least loaded service; healthy ones first, and among them those not tried yet.
            endpoint = min(
                self._services, key=lambda e: (not e.healthy, e.url in tried, e.in_flight)
            )
            url = endpoint.url + path
            tried.add(endpoint.url)
            endpoint.in_flight += 1
            try:
                status, text, headers = await self._exchange(endpoint, path, body, number, silence)
            except CONNECTION_FAILURES as error:
                self._distrust(endpoint)
                raise _Fault(f"sandbox {url} failed: {describe_failure(error)}") from error
            except asyncio.CancelledError:
                self._withdraw(endpoint, number)
                raise
            finally:
                endpoint.in_flight -= 1
        if status in _UNAVAILABLE:
            self._distrust(endpoint)
        if 400 <= status < 500 and not is_temporary(status):
            kind = RequestRefused if status in _REFUSED else UserError
            raise kind(f"sandbox {url} refused the request ({status}): {_detail(text)}")
        if status != 200:
            kind = _Busy if wire.BUSY_HEADER in headers else _Fault
            least = retry_after(headers.get("Retry-After", ""))
            raise kind(f"sandbox {url} answered {status}: {_detail(text)}", least)
        return _parse(url, text, answer)

    async def _exchange(
        self, endpoint: _Endpoint, path: str, body: bytes, number: str, silence: SilenceDeadline
    ) -> tuple[int, str, Mapping[str, str]]:
        """Status, text and headers of the answer, however long the work waits and runs."""
        session, headers = self._open_session(), {**self._wait, **endpoint.headers}
        sent = {**_JSON, **headers, wire.JOB_HEADER: number}
        asking = session.post(
            endpoint.url + path, data=body, headers=sent, timeout=self._within(silence)
        )
        while True:
            async with asking as response:
                status, text = response.status, _decoded(endpoint.url, await response.read())
                if endpoint.goes_on(status, response.headers, self._silence):
                    self._silent = False
                    silence.restart_countdown()
                if status == _UNDER_WAY and "Location" in response.headers:
                    if not silence.seconds_left:
                        raise TimeoutError  # also of a service that answers within the least limit
                    asking = session.get(
                        f"{endpoint.url}/jobs/{number}",
                        headers=headers,
                        timeout=self._within(silence),
                    )
                    continue
                lost = status == _LOST and response.method == "GET"
                if lost:
                    raise _Fault(f"sandbox {endpoint.url} lost the job: {_detail(text)}")
                return status, text, response.headers

    def _within(self, silence: SilenceDeadline) -> aiohttp.ClientTimeout:
        # aiohttp takes 0 for no limit.
        return aiohttp.ClientTimeout(total=max(0.001, min(self._timeout, silence.seconds_left)))

    def _withdraw(self, endpoint: _Endpoint, number: str) -> None:
        """Ask the service to give up the work, without waiting for it."""

        async def tell() -> None:
            limit = aiohttp.ClientTimeout(total=_WITHDRAWAL_SECONDS)
            url = f"{endpoint.url}/jobs/{number}"
            # A service that does not receive this gives the work up after a while.
            with contextlib.suppress(*CONNECTION_FAILURES):
                async with self._open_session().delete(
                    url, timeout=limit, headers=endpoint.headers
                ):
                    pass

        task = asyncio.create_task(tell())
        self._withdrawing.add(task)
        task.add_done_callback(self._withdrawing.discard)

    def _distrust(self, endpoint: _Endpoint) -> None:
        """Send no more requests to ``endpoint`` until it answers a health check."""
        if len(self._services) > 1 and endpoint.url not in self._checks:
            endpoint.healthy = False
            self._checks[endpoint.url] = asyncio.create_task(self._check(endpoint))

    async def _check(self, endpoint: _Endpoint) -> None:
        while (await self._health(endpoint))[0]:
            await asyncio.sleep(_CHECK_PAUSE_SECONDS)
        endpoint.healthy = True
        del self._checks[endpoint.url]

    async def _health(self, service: _Endpoint) -> tuple[str, str]:
        """The fault of a service, empty if it is healthy, and its isolation level."""
        limit = aiohttp.ClientTimeout(total=_CHECK_SECONDS)
        try:
            async with self._open_session().get(
                service.url + "/v1/ping", timeout=limit, headers=service.headers
            ) as response:
                status, level = response.status, response.headers.get(wire.LEVEL_HEADER, "")
        except CONNECTION_FAILURES as error:
            return f"does not answer: {describe_failure(error)}", ""
        return ("" if status == 200 else f"answers /v1/ping with {status}"), level


def _decoded(url: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _Fault(f"sandbox {url} sent an answer that is not UTF-8: {error}") from error


def _parse(url: str, text: str, answer: type[AnswerT]) -> AnswerT:
    try:
        parsed = answer.model_validate_json(text)
    except ValidationError as error:
        raise _Fault(f"sandbox {url} sent a malformed answer: {error}") from error
    runs = (
        [test.exec_info for test in parsed.tests]
        if isinstance(parsed, wire.EvalResult)
        else [parsed]
    )
    for run in runs:
        if isinstance(run, wire.RunCodeResponse) and run.status is wire.RunStatus.SANDBOX_ERROR:
            raise _Fault(f"sandbox {url} reports SandboxError: {run.message}")
    return parsed


def _detail(text: str) -> str:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text[:500]
    return str(parsed.get("detail", parsed) if isinstance(parsed, dict) else parsed)[:2000]
