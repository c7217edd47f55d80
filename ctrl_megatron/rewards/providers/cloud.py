"""The providers ``e2b`` and ``morph``: one machine of a cloud per request, through the cloud's own
client library. A script runs there as shell commands.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ctrl_megatron.rewards.providers.contract import (
    ProviderCounters,
    ProviderError,
    ProviderSetupError,
    load_client,
    require_key,
)
from ctrl_megatron.rewards.providers.scripts import Script, ScriptResult

Value = TypeVar("Value")
_log = logging.getLogger(__name__)

_DIRECTORY = "/tmp/job"
_OUTPUT_BYTES = 1 << 20
"""Kept of a program's output; it is cut off on the machine, so a flood never travels."""
_STDERR_BYTES = 4096
_NEEDED = "bash python3 timeout head tail base64"
"""Programs that the machine must have."""
_KILLED = 137  # what coreutils' timeout says after its SIGKILL
_CHUNK = 1 << 16
"""Bytes of base64 in one command: the kernel takes 128 KiB per argument."""
_SLACK_SECONDS = 15.0
"""After a script's time; a command that has not ended by then counts as lost."""


class E2BBackend:
    """Scripts in E2B sandboxes without internet access.

    ``template`` names the machine image (E2B's code interpreter by default), ``lifetime`` is its
    time to live in seconds, should we not be there to end it. ``create`` replaces the library's
    ``AsyncSandbox.create``. Further ``connection`` options go to the library (``domain``,
    ``api_url``, ``proxy``...).
    """

    name = "e2b"
    languages = ("python",)
    tests_per_run = None

    def __init__(
        self,
        *,
        api_key: str | None,
        template: str | None = None,
        lifetime: int = 300,
        request_seconds: float = 30.0,
        create: Callable[..., Awaitable[Any]] | None = None,
        **connection: Any,
    ) -> None:
        key = require_key(self.name, api_key, "E2B_API_KEY")
        if create is None:
            library = load_client(self.name, "e2b_code_interpreter", "e2b-code-interpreter")
            create = library.AsyncSandbox.create
        assert create is not None
        self._create = create
        self._template, self._lifetime = template, lifetime
        self._options = {**connection, "api_key": key, "request_timeout": request_seconds}
        self._probed = False

    @property
    def identity(self) -> Mapping[str, Any]:
        """The machine image."""
        return {"template": self._template}

    @asynccontextmanager
    async def session(self, counters: ProviderCounters) -> AsyncIterator[_Machine]:
        """A sandbox of its own, killed at the end."""
        options = {**self._options, "template": self._template, "timeout": self._lifetime}
        sandbox = await _guarded(self._create(allow_internet_access=False, **options), _e2b_error)
        try:
            machine = _E2BMachine(sandbox)
            if not self._probed:
                await machine.probe("the E2B template")
                self._probed = True
            yield machine
        finally:
            await _end(sandbox.kill, counters, "an E2B sandbox")

    async def close(self) -> None:
        """Nothing: the library keeps its own connections."""


class MorphBackend:
    """Scripts in instances started from ``snapshot_id``, which must have Python 3 and coreutils.

    ``lifetime`` is an instance's time to live in seconds, should we not be there to stop it;
    ``start_seconds`` the longest wait for one. ``base_url`` replaces Morph's; ``connect`` replaces
    the library's ``MorphCloudClient``.
    """

    name = "morph"
    languages = ("python",)
    tests_per_run = None

    def __init__(
        self,
        *,
        api_key: str | None,
        snapshot_id: str,
        lifetime: int = 600,
        start_seconds: float = 120.0,
        base_url: str | None = None,
        connect: Callable[..., Any] | None = None,
    ) -> None:
        key = require_key(self.name, api_key, "MORPH_API_KEY")
        if not snapshot_id:
            raise ProviderSetupError("the provider morph needs snapshot_id, a snapshot with Python")
        if connect is None:
            connect = load_client(self.name, "morphcloud.api", "morphcloud").MorphCloudClient
        assert connect is not None
        self._client = connect(api_key=key, base_url=base_url)
        self._snapshot_id, self._lifetime = snapshot_id, lifetime
        self._start_seconds = start_seconds
        self._probed = False

    @property
    def identity(self) -> Mapping[str, Any]:
        """The snapshot."""
        return {"snapshot_id": self._snapshot_id}

    @asynccontextmanager
    async def session(self, counters: ProviderCounters) -> AsyncIterator[_Machine]:
        """An instance of its own, stopped at the end."""
        options = {"ttl_seconds": self._lifetime, "timeout": self._start_seconds}
        start = self._client.instances.astart(self._snapshot_id, ttl_action="stop", **options)
        instance = await _guarded(start, _morph_error)
        try:
            machine = _MorphMachine(instance)
            if not self._probed:
                await machine.probe("the Morph snapshot")
                self._probed = True
            yield machine
        finally:
            await _end(instance.astop, counters, "a Morph instance")

    async def close(self) -> None:
        """Nothing: the library keeps its own connections."""


@dataclass
class _Machine:
    """One machine, behind the library's object for it."""

    handle: Any

    async def probe(self, machine: str) -> None:
        """Raises ``ProviderSetupError`` naming the programs that the machine lacks."""
        look = f'for n in {_NEEDED}; do command -v "$n" >/dev/null || echo "$n"; done'
        stdout, _, _ = await self.command(look, 30.0)
        if missing := stdout.split():
            raise ProviderSetupError(
                f"{machine} lacks {', '.join(missing)}; choose one with bash, Python 3 and "
                "coreutils"
            )

    async def run(self, script: Script) -> ScriptResult:
        """See ``ScriptSession.run``."""
        for name, text in (("main.py", script.source), ("stdin.txt", script.stdin)):
            await self.write(name, text)
        stdout, stderr, code = await self.command(
            _run_command(script.seconds), script.seconds + _SLACK_SECONDS
        )
        flooded = len(stdout.encode(errors="surrogatepass")) > _OUTPUT_BYTES
        return ScriptResult(
            stdout=stdout[:_OUTPUT_BYTES],
            stderr=stderr,
            exit_code=None if code == _KILLED else code,
            timed_out=code == _KILLED,
            cut_at=_OUTPUT_BYTES if flooded else None,
        )

    async def write(self, name: str, text: str) -> None:
        """Write a file of the job."""
        raise NotImplementedError

    async def command(self, text: str, seconds: float) -> tuple[str, str, int]:
        """Output, errors and exit status of a shell command."""
        raise NotImplementedError


class _E2BMachine(_Machine):
    async def write(self, name: str, text: str) -> None:
        await _guarded(self.handle.files.write(f"{_DIRECTORY}/{name}", text), _e2b_error)

    async def command(self, text: str, seconds: float) -> tuple[str, str, int]:
        try:
            done = await self.handle.commands.run(text, timeout=math.ceil(seconds))
        except Exception as error:
            # The library raises for a non-zero exit status, which is a result.
            if type(error).__name__ != "CommandExitException":
                raise _e2b_error(error) from error
            done = error
        return done.stdout or "", done.stderr or "", done.exit_code  # type: ignore[union-attr]


class _MorphMachine(_Machine):
    async def write(self, name: str, text: str) -> None:
        for command in _uploads(name, text):
            _, stderr, code = await self.command(command, 60.0)
            if code != 0:
                raise ProviderError(f"cannot write {name}: {stderr[:300]}")

    async def command(self, text: str, seconds: float) -> tuple[str, str, int]:
        done = await _guarded(self.handle.aexec(text, timeout=seconds), _morph_error)
        return done.stdout, done.stderr, done.exit_code


def _uploads(name: str, text: str) -> Iterator[str]:
    """Commands that write a file. Each may be repeated: a client may retry what did arrive."""
    data = base64.b64encode(text.encode(errors="surrogatepass")).decode()
    parts = [data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK)] or [""]
    for number, part in enumerate(parts):
        target = f"{_DIRECTORY}/{name}.{number:05d}"
        yield f"mkdir -p {_DIRECTORY} && printf %s {shlex.quote(part)} > {target}"
    yield f"cat {_DIRECTORY}/{name}.[0-9]* | base64 -d > {_DIRECTORY}/{name}"


def _run_command(seconds: float) -> str:
    """Runs ``main.py`` with ``stdin.txt``, which is gone before the program starts."""
    inner = (
        f"cd {_DIRECTORY} && exec 0<stdin.txt && rm -f stdin.txt stdin.txt.* && "
        f"timeout -s KILL {seconds:.3f} python3 main.py 2>stderr.txt | "
        f"head -c {_OUTPUT_BYTES + 1}; "
        f"code=${{PIPESTATUS[0]}}; tail -c {_STDERR_BYTES} stderr.txt >&2; exit $code"
    )
    return f"bash -c {shlex.quote(inner)}"


async def _guarded(call: Awaitable[Value], translated: Callable[[Exception], Exception]) -> Value:
    try:
        return await call
    except Exception as error:
        raise translated(error) from error


def _e2b_error(error: Exception) -> Exception:
    """The library's exceptions by name, so that the library need not be imported to read them."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = f"{type(error).__name__}: {error}"[:500]
    if "AuthenticationException" in kinds:
        return ProviderSetupError(f"E2B refused the API key (E2B_API_KEY): {text}")
    if kinds & {"InvalidArgumentException", "TemplateException"}:
        return ProviderSetupError(f"E2B refused the request: {text}")
    return ProviderError(text)


def _morph_error(error: Exception) -> Exception:
    status, text = getattr(error, "status_code", None), f"{type(error).__name__}: {error}"[:500]
    if status in (401, 403):
        return ProviderSetupError(f"Morph refused the API key (MORPH_API_KEY): {text}")
    if status in (400, 404, 422):
        return ProviderSetupError(f"Morph refused the request: {text}")
    return ProviderError(text)


async def _end(stop: Callable[[], Awaitable[Any]], counters: ProviderCounters, what: str) -> None:
    try:
        # Shielded: a cancelled caller must not leave a paid machine running.
        await asyncio.shield(stop())
    except Exception as error:
        counters.left_open += 1
        _log.warning("%s could not be ended and lives on for a while: %s", what, error)
