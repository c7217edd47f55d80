"""The provider ``e2b`` with ``e2b_router_url``: a server in the local network that keeps E2B
sandboxes and runs batches of Python scripts in them (``scripts/e2b_router.py`` of open-r1).

A script has no standard input there, and a cell of a notebook runs it. What is sent is therefore a
Python program that runs the script as a process of its own and prints the process's result.
"""

from __future__ import annotations

import base64
import json
import math
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from ctrl_megatron.rewards.providers.contract import (
    ProviderCounters,
    ProviderError,
    ProviderSetupError,
    Script,
    ScriptResult,
)
from ctrl_megatron.rewards.providers.languages import BUILD_SECONDS, LANGUAGES, compiler_complaint

_OUTPUT_CHARACTERS = 1 << 20
_SLACK_SECONDS = 15.0
_LAUNCHER = """
import base64, json, os, shutil, subprocess, tempfile
job = json.loads(base64.b64decode({job!r}))
folder = tempfile.mkdtemp()
with open(os.path.join(folder, job["name"]), "w", encoding="utf-8", errors="surrogatepass") as file:
    file.write(job["source"])
def call(command, text, seconds):
    done = subprocess.run(command.split(), cwd=folder, input=text.encode(errors="surrogatepass"),
                          capture_output=True, timeout=seconds)
    most = job["most"]
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return {{"stdout": out[:most + 1], "stderr": err[-4096:], "exit_code": done.returncode}}
missing = [name for name in job["tools"] if shutil.which(name) is None]
result = {{"missing": missing}}
if not missing:
    try:
        result = {{"exit_code": 0}}
        if job["build"]:
            result = call(job["build"], "", job["build_seconds"])
        if result["exit_code"] == 0:
            result = call(job["run"], job["stdin"], job["seconds"])
        else:
            result["compiler"] = result["stderr"] + result["stdout"]
    except subprocess.TimeoutExpired:
        result = {{"timed_out": True}}
shutil.rmtree(folder, ignore_errors=True)
print({mark!r} + base64.b64encode(json.dumps(result).encode()).decode())
"""


class E2BRouterBackend:
    """Runs scripts by ``POST /execute_batch`` of the router at ``e2b_router_url``, an address with
    or without a scheme. The router keeps the API key. ``request_seconds`` is its limit for the
    start of a sandbox.
    """

    name, tests_per_run = "e2b", None
    languages = tuple(LANGUAGES)

    def __init__(self, *, e2b_router_url: str, request_seconds: float = 30.0) -> None:
        if not e2b_router_url.strip():
            raise ProviderSetupError("e2b_router_url is empty; give HOST:PORT of the router")
        scheme = "" if "://" in e2b_router_url else "http://"
        self._address = f"{scheme}{e2b_router_url.strip().rstrip('/')}/execute_batch"
        self._request_seconds = request_seconds
        self._session: aiohttp.ClientSession | None = None
        self.identity: Mapping[str, Any] = {"router": True}

    @asynccontextmanager
    async def session(self, counters: ProviderCounters) -> AsyncIterator[E2BRouterBackend]:
        """The router: it gives every script a sandbox."""
        yield self

    async def run(self, script: Script) -> ScriptResult:
        language = LANGUAGES[script.language]
        mark = secrets.token_hex(16)
        job = {
            "name": language.source,
            "source": script.source,
            "build": language.build,
            "build_seconds": BUILD_SECONDS,
            "run": language.run,
            "stdin": script.stdin,
            "seconds": script.seconds,
            "most": _OUTPUT_CHARACTERS,
            "tools": language.tools.split(),
        }
        text = base64.b64encode(json.dumps(job).encode()).decode()
        seconds = math.ceil(script.seconds + BUILD_SECONDS * bool(language.build) + _SLACK_SECONDS)
        answer = await self._ask(_LAUNCHER.format(job=text, mark=mark), seconds)
        return _result(_printed(answer, mark))

    async def _ask(self, source: str, seconds: int) -> Any:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession()
        body = {
            "scripts": [source],
            "languages": ["python"],
            "timeout": seconds,
            "request_timeout": math.ceil(self._request_seconds),
        }
        limit = aiohttp.ClientTimeout(total=seconds + self._request_seconds + _SLACK_SECONDS)
        try:
            async with self._session.post(self._address, json=body, timeout=limit) as response:
                if response.status in (400, 404, 405, 422):
                    said = (await response.text())[:300]
                    raise ProviderSetupError(
                        f"the router refused the request with status {response.status}: {said}"
                    )
                if response.status != 200:
                    raise ProviderError(f"the router answered with status {response.status}")
                (answer,) = await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ProviderError(f"the router: {type(error).__name__}: {error}"[:300]) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _printed(answer: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    """The record behind ``mark`` in the output of the script. Raises ``ProviderError`` where the
    script did not get so far.
    """
    execution = answer.get("execution") or {}
    printed = "".join((execution.get("logs") or {}).get("stdout") or ())
    _, found, record = printed.rpartition(mark)
    if not found:
        why = answer.get("exception_str") or execution.get("error") or "it printed nothing"
        raise ProviderError(f"the router ran no program: {str(why)[:300]}")
    return json.loads(base64.b64decode(record.split()[0]))


def _result(record: Mapping[str, Any]) -> ScriptResult:
    if missing := record.get("missing"):
        raise ProviderSetupError(f"the router's sandboxes lack {', '.join(missing)}")
    if record.get("timed_out"):
        return ScriptResult(stdout="", timed_out=True)
    if "compiler" in record:
        complaint = compiler_complaint(record["compiler"])
        return ScriptResult(stdout="", stderr=complaint, exit_code=record["exit_code"])
    stdout = record["stdout"]
    return ScriptResult(
        stdout=stdout[:_OUTPUT_CHARACTERS],
        stderr=record["stderr"],
        exit_code=record["exit_code"],
        cut_at=_OUTPUT_CHARACTERS if len(stdout) > _OUTPUT_CHARACTERS else None,
    )
