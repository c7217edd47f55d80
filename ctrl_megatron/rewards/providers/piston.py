"""The provider ``piston``: a Piston service (``/api/v2/execute``) over HTTP.

Piston's default limits are low: 3 s per run and 1024 characters of output. So every test is a
separate run, and an error message names a limit that is too low.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from ctrl_megatron.rewards.providers.contract import (
    ProviderCounters,
    ProviderError,
    ProviderSetupError,
    Script,
    ScriptResult,
)
from ctrl_megatron.sandbox.access import split_credentials
from ctrl_megatron.sandbox.client.attempts import CONNECTION_FAILURES, described, is_temporary

_LANGUAGES = {"python": "python", "cpp": "c++", "bash": "bash"}
_FILES = {"python": "main.py", "cpp": "main.cpp", "bash": "main.sh"}
_FLOODED = ("OL", "EL")
"""``status`` of a stage that Piston stopped because of its output or its errors."""
_READ = 1 << 16
"""Bytes of output that Piston keeps or drops as one piece."""
_COMPILE_ERROR = "error: "
_HTTP_SLACK = 60.0
"""Seconds that a request may spend in Piston's queue and compiler."""


class PistonBackend:
    """Runs scripts by ``POST {endpoint}/execute``; ``endpoint`` ends in ``/api/v2``.

    ``api_key`` is sent as ``Authorization``. ``version`` is the version of the runtime (``*`` is
    the newest installed), ``memory_mb`` the limit of each program's memory, ``output_limit`` the
    service's ``PISTON_OUTPUT_MAX_SIZE``.
    """

    name = "piston"
    languages = tuple(_LANGUAGES)
    tests_per_run = 1

    def __init__(
        self,
        endpoint: str | None,
        *,
        api_key: str | None = None,
        version: str = "*",
        memory_mb: int | None = None,
        output_limit: int = 1024,
    ) -> None:
        try:
            self._url, self._headers = split_credentials((endpoint or "").rstrip("/"), api_key)
        except ValueError as error:
            raise ProviderSetupError(
                "the provider piston needs endpoint, an http:// URL such as that of "
                f"PISTON_ENDPOINT: {error}"
            ) from error
        self.identity = {"version": version, "memory_mb": memory_mb}
        self._version, self._memory_mb = version, memory_mb
        self._output_limit = output_limit
        self._http: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def session(self, counters: ProviderCounters) -> AsyncIterator[PistonBackend]:
        """The service: it runs every script separately."""
        yield self

    async def run(self, script: Script) -> ScriptResult:
        milliseconds = math.ceil(script.seconds * 1000)
        body = {
            "language": _LANGUAGES[script.language],
            "version": self._version,
            # Piston refuses an empty file.
            "files": [{"name": _FILES[script.language], "content": script.source or "\n"}],
            "stdin": script.stdin,
            "run_timeout": milliseconds,
            "run_cpu_time": milliseconds,
        }
        if self._memory_mb is not None:
            body["run_memory_limit"] = self._memory_mb << 20
        url = f"{self._url}/execute"
        timeout = aiohttp.ClientTimeout(total=script.seconds + _HTTP_SLACK)
        try:
            async with self._session().post(
                url, json=body, headers=self._headers, timeout=timeout
            ) as response:
                status, text = response.status, await response.text()
        except CONNECTION_FAILURES as error:
            raise ProviderError(f"{url} failed: {described(error)}") from error
        if status != 200:
            raise _refusal(status, text)
        return _result(text, self._output_limit)

    async def close(self) -> None:
        """Close the connections."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:
            self._http, self._loop = aiohttp.ClientSession(), loop
        return self._http


def _refusal(status: int, text: str) -> Exception:
    try:
        reason = str(json.loads(text)["message"])[:500]
    except (ValueError, KeyError, TypeError):
        reason = text[:500]
    if status in (401, 403):
        return ProviderSetupError(f"Piston refused the key (PISTON_API_KEY): {reason}")
    if 400 <= status < 500 and not is_temporary(status):
        return ProviderSetupError(
            f"Piston refused the request: {reason}; install the runtime it names with Piston's "
            "package manager, or raise its PISTON_RUN_TIMEOUT, PISTON_RUN_CPU_TIME or "
            "PISTON_RUN_MEMORY_LIMIT"
        )
    return ProviderError(f"status {status}: {reason}")


def _result(text: str, output_limit: int) -> ScriptResult:
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise _malformed(text)
    compiled, run = answer.get("compile"), answer.get("run")
    if isinstance(compiled, dict):
        result = _ended({"stdout": "", **compiled}, text, output_limit)
        if result.exit_code != 0:
            # A compiler that was stopped because of its output may have written warnings only.
            known = result.cut_at is None or _COMPILE_ERROR in result.stderr
            return replace(result, stdout="", cut_at=None if known else result.cut_at)
    if not isinstance(run, dict):
        raise _malformed(text)
    return _ended(run, text, output_limit)


def _ended(stage: dict[str, Any], text: str, output_limit: int) -> ScriptResult:
    """The result of a compiler or program. Raises ``ProviderError`` where the answer has none."""
    status, code, stdout = stage.get("status"), stage.get("code"), stage.get("stdout")
    if status == "XX":
        raise ProviderError(f"internal error of Piston: {stage.get('message')}")
    stopped = code is None and bool(status or stage.get("signal"))
    if not isinstance(stdout, str) or not (type(code) is int or stopped):
        raise _malformed(text)
    stderr = str(stage.get("stderr") or "")
    # Releases without `status` kill because of output, time or memory. The last two count as a
    # time-out, which is never stored as a verdict.
    killed = stage.get("signal") == "SIGKILL" and status is None
    if status == "OL":
        # It drops a piece that would exceed the limit, and keeps later pieces that are short
        # enough.
        stdout = stdout[: max(0, output_limit - _READ)]
    flooded = status in _FLOODED or (killed and max(len(stdout), len(stderr)) >= output_limit)
    return ScriptResult(
        stdout=stdout,
        stderr=stderr or str(stage.get("message") or ""),
        exit_code=code,
        timed_out=status == "TO" or (killed and not flooded),
        cut_at=output_limit if flooded else None,
    )


def _malformed(text: str) -> ProviderError:
    return ProviderError(f"malformed answer: {text[:300]!r}")
