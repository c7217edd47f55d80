"""Asynchronous client of the sandbox service (ours or SandboxFusion's).

A fault of the service is retried and then raised; a fault of the user's program is a result.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from ctrl_megatron.sandbox.wire import (
    EvalResult,
    RunCodeRequest,
    RunCodeResponse,
    RunStatus,
    SubmitRequest,
)

Answer = TypeVar("Answer", bound=BaseModel)


class SandboxError(RuntimeError):
    """The sandbox itself failed, after every retry; nothing is known about the program."""


class _Fault(Exception):
    """One attempt failed for a reason that is ours; worth another attempt."""


@dataclass(slots=True)
class ClientCounters:
    """What a client did so far."""

    requests: int = 0
    """Calls of ``run_code`` and ``submit``."""
    retries: int = 0
    """Attempts beyond the first of each call."""
    failures: int = 0
    """Calls that ended in ``SandboxError``."""


class SandboxClient:
    """Talks to one or several services; each attempt goes to the least loaded one.

    It binds to the event loop of its first call, which may run in any thread. ``timeout`` (seconds)
    covers one HTTP attempt, ``backoff`` is the first pause between attempts (doubled each time, at
    most 60 s, with jitter). ``max_concurrency`` bounds requests on the wire; a request that waits
    for its retry holds no place.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        *,
        timeout: float = 320.0,
        attempts: int = 5,
        max_concurrency: int = 256,
        backoff: float = 1.0,
    ) -> None:
        endpoints = [endpoint] if isinstance(endpoint, str) else list(endpoint)
        if not endpoints or not all(url.startswith(("http://", "https://")) for url in endpoints):
            raise ValueError(f"sandbox endpoint must be one or more http:// URLs, got {endpoint!r}")
        if attempts < 1 or max_concurrency < 1:
            raise ValueError("attempts and max_concurrency must be at least 1")
        self.endpoints = tuple(url.rstrip("/") for url in endpoints)
        self.counters = ClientCounters()
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._attempts = attempts
        self._wait = wait_exponential(multiplier=backoff, max=60.0) + wait_random(0.0, backoff)
        self._limit = max_concurrency
        self._in_flight = dict.fromkeys(self.endpoints, 0)
        self._session: aiohttp.ClientSession | None = None
        self._semaphore: asyncio.Semaphore | None = None

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        """Run a program. Raises ``SandboxError`` (service fault) or ``ValueError`` (request
        refused).
        """
        return await self._call("/run_code", request, RunCodeResponse)

    async def submit(self, request: SubmitRequest) -> EvalResult:
        """Judge a completion. Raises ``SandboxError`` (service fault) or ``ValueError`` (request
        refused).
        """
        return await self._call("/submit", request, EvalResult)

    async def ping(self) -> None:
        """Return when every service answers. Raises ``SandboxError`` naming one that does not."""
        for endpoint in self.endpoints:
            try:
                async with self._open_session().get(endpoint + "/v1/ping") as response:
                    healthy = response.status == 200
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise SandboxError(f"sandbox {endpoint} does not answer: {_text(error)}") from error
            if not healthy:
                raise SandboxError(f"sandbox {endpoint} answers /v1/ping with {response.status}")

    async def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        session, self._session, self._semaphore = self._session, None, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._limit)
            self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector)
        return self._session

    def _slot(self) -> asyncio.Semaphore:
        if self._semaphore is None:
            self._semaphore = asyncio.Semaphore(self._limit)
        return self._semaphore

    async def _call(self, path: str, request: BaseModel, answer: type[Answer]) -> Answer:
        self.counters.requests += 1
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._attempts),
            wait=self._wait,
            retry=retry_if_exception_type(_Fault),
            before_sleep=self._count_retry,
            reraise=True,
        )
        body = request.model_dump(mode="json")
        try:
            return await retrying(self._attempt, path, body, answer)
        except _Fault as fault:
            self.counters.failures += 1
            raise SandboxError(f"{fault} (gave up after {self._attempts} attempts)") from fault

    def _count_retry(self, _: RetryCallState) -> None:
        self.counters.retries += 1

    async def _attempt(self, path: str, body: dict[str, Any], answer: type[Answer]) -> Answer:
        async with self._slot():
            endpoint = min(self.endpoints, key=self._in_flight.__getitem__)
            self._in_flight[endpoint] += 1
            try:
                async with self._open_session().post(endpoint + path, json=body) as response:
                    status, text = response.status, await response.text()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise _Fault(f"sandbox {endpoint}{path} failed: {_text(error)}") from error
            finally:
                self._in_flight[endpoint] -= 1
        if 400 <= status < 500:
            raise ValueError(f"sandbox {endpoint}{path} refused the request: {_detail(text)}")
        if status != 200:
            raise _Fault(f"sandbox {endpoint}{path} answered {status}: {_detail(text)}")
        return _parse(endpoint + path, text, answer)


def _parse(url: str, text: str, answer: type[Answer]) -> Answer:
    try:
        parsed = answer.model_validate_json(text)
    except ValidationError as error:
        raise _Fault(f"sandbox {url} sent a malformed answer: {error}") from error
    fault = _service_fault(parsed)
    if fault is not None:
        raise _Fault(f"sandbox {url} reports SandboxError: {fault}")
    return parsed


def _service_fault(answer: BaseModel) -> str | None:
    """The message of a fault inside the service that an answer carries, or None."""
    if isinstance(answer, EvalResult):
        runs = [test.exec_info for test in answer.tests]
    else:
        runs = [answer] if isinstance(answer, RunCodeResponse) else []
    return next((run.message for run in runs if run.status is RunStatus.SANDBOX_ERROR), None)


def _detail(text: str) -> str:
    try:
        parsed = json.loads(text)
    except ValueError:
        return text[:500]
    return str(parsed.get("detail", parsed) if isinstance(parsed, dict) else parsed)[:2000]


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
