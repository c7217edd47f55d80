"""The providers ``e2b`` and ``morph``: one machine in a cloud per request, through the cloud's
client library. A script runs there by shell commands.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import logging
import math
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ctrl_megatron.rewards.providers.contract import (
    ProviderCounters,
    ProviderError,
    ProviderSetupError,
    Script,
    ScriptResult,
)
from ctrl_megatron.rewards.providers.languages import (
    BUILD_SECONDS,
    LANGUAGES,
    ScriptLanguage,
    compiler_complaint,
)

Value = TypeVar("Value")
_log = logging.getLogger(__name__)

_DIRECTORY = "/tmp/job"
_OUTPUT_BYTES = 1 << 20
"""Limit of a program's output. The machine cuts the rest off before the output is sent."""
_STDERR_BYTES = 4096
_NEEDED = "bash python3 timeout head tail base64"
"""Programs that the machine must provide."""
_KILLED = 137  # exit status of coreutils' timeout after its SIGKILL
_CHUNK = 1 << 16
"""Bytes of base64 in one command: the kernel accepts 128 KiB per argument."""
_REMOVAL_SECONDS = 30.0
_E2B_CONNECTION = (
    *("domain", "api_url", "sandbox_url", "proxy", "headers", "api_headers", "retries"),
    *("debug", "validate_api_key", "http_version"),
)
"""Options of E2B's library that say how it connects."""
_SLACK_SECONDS = 15.0
"""Seconds after a script's time limit until its command counts as lost."""


class _CloudBackend:
    """A machine for each request, which is removed at the end."""

    name: str
    package: str
    """Name of the package that pip installs."""
    languages: tuple[str, ...] = tuple(LANGUAGES)
    tests_per_run: int | None = None
    identity: Mapping[str, Any]

    def __init__(self) -> None:
        self._probed = False
        self._found = {"python"}
        """The languages whose tools the machines are known to have."""

    @asynccontextmanager
    async def session(self, counters: ProviderCounters) -> AsyncIterator[_Machine]:
        machine = await self._start()
        try:
            if not self._probed:
                await machine.probe()
                self._probed = True
            machine.found = self._found
            yield machine
        finally:
            try:
                # Shielded, because a cancelled caller must not leave a paid machine running.
                await asyncio.wait_for(asyncio.shield(machine.end()), _REMOVAL_SECONDS)
            except Exception as error:
                counters.left_open += 1
                what = f"a machine of {self.name}"
                _log.warning("%s was not removed and runs until its time to live: %s", what, error)

    async def close(self) -> None:
        """Does nothing: the library manages its connections."""

    async def _start(self) -> _Machine:
        raise NotImplementedError

    def _key(self, key: str | None, variable: str) -> str:
        if not key or not key.strip():
            raise ProviderSetupError(
                f"the provider {self.name} needs an API key: set the environment variable "
                f"{variable}"
            )
        return key.strip()

    def _library(self, module: str) -> Any:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise ProviderSetupError(
                f"the provider {self.name} needs the package {self.package}, which cannot be "
                f"imported ({error}); pip install 'ctrl_megatron[{self.name}]'"
            ) from error


class E2BBackend(_CloudBackend):
    """Runs scripts in E2B sandboxes without internet access.

    ``template`` is the machine image (E2B's code interpreter by default). ``lifetime`` is a
    machine's time to live in seconds, for machines that are not removed. ``create`` replaces the
    library's ``AsyncSandbox.create``. The library receives further ``connection`` options
    (``domain``, ``api_url``, ``proxy``...); raises ``ProviderSetupError`` for others.
    """

    name, package = "e2b", "e2b-code-interpreter"

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
        super().__init__()
        if unknown := [name for name in connection if name not in _E2B_CONNECTION]:
            known = "template", "lifetime", "request_seconds", *_E2B_CONNECTION
            raise ProviderSetupError(
                f"provider e2b has no option {unknown[0]!r}; it has {', '.join(known)}"
            )
        self.identity = {"template": template}
        self._options = {
            **connection,
            "api_key": self._key(api_key, "E2B_API_KEY"),
            "request_timeout": request_seconds,
            "template": template,
            "timeout": lifetime,
            "allow_internet_access": False,
        }
        self._create = create or self._library("e2b_code_interpreter").AsyncSandbox.create

    async def _start(self) -> _Machine:
        return _E2BMachine(await _guarded(self._create(**self._options), _e2b_error))


class MorphBackend(_CloudBackend):
    """Runs scripts in instances of ``snapshot_id``, which must provide Python 3, coreutils and the
    tools of the languages that are judged (``languages.LANGUAGES``).

    ``lifetime`` is an instance's time to live in seconds, for instances that are not removed;
    ``start_seconds`` is the longest wait for its start. ``base_url`` replaces Morph's address;
    ``connect`` replaces the library's ``MorphCloudClient``.
    """

    name, package = "morph", "morphcloud"

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
        super().__init__()
        key = self._key(api_key, "MORPH_API_KEY")
        if not snapshot_id:
            raise ProviderSetupError("the provider morph needs snapshot_id, a snapshot with Python")
        client: Any = connect or self._library("morphcloud.api").MorphCloudClient
        self._instances = client(api_key=key, base_url=base_url).instances
        self.identity = {"snapshot_id": snapshot_id}
        self._options = {
            "ttl_seconds": lifetime,
            "ttl_action": "stop",
            "timeout": start_seconds,
        }

    async def _start(self) -> _Machine:
        start = self._instances.astart(self.identity["snapshot_id"], **self._options)
        return _MorphMachine(await _guarded(start, _morph_error))


@dataclass
class _Machine:
    """One machine; ``handle`` is the library's object for it."""

    handle: Any
    found: set[str] = field(default_factory=set)
    """The languages whose tools this kind of machine is known to have."""
    _built: tuple[str, ScriptResult | None] = ("", None)
    """The source that was built last, and the result where that failed."""

    async def probe(self, needed: str = _NEEDED) -> None:
        """Raise ``ProviderSetupError`` that names the programs that the machine lacks."""
        look = f'for n in {needed}; do command -v "$n" >/dev/null || echo "$n"; done'
        stdout, _, _ = await self.command(look, 30.0)
        if missing := stdout.split():
            raise ProviderSetupError(
                f"the machine lacks {', '.join(missing)}; choose a template or snapshot with "
                f"{needed}"
            )

    async def run(self, script: Script) -> ScriptResult:
        language = LANGUAGES[script.language]
        if script.language not in self.found:
            await self.probe(language.tools)
            self.found.add(script.language)
        if not language.build or self._built[0] != script.source:
            await self.write(language.source, script.source)
            self._built = script.source, await self._build(language)
        if (failed := self._built[1]) is not None:
            return failed
        await self.write("stdin.txt", script.stdin)
        stdout, stderr, code = await self.command(
            _run_command(language.run, script.seconds), script.seconds + _SLACK_SECONDS
        )
        flooded = len(stdout.encode(errors="surrogatepass")) > _OUTPUT_BYTES
        return ScriptResult(
            stdout=stdout[:_OUTPUT_BYTES],
            stderr=stderr,
            exit_code=None if code == _KILLED else code,
            timed_out=code == _KILLED,
            cut_at=_OUTPUT_BYTES if flooded else None,
        )

    async def _build(self, language: ScriptLanguage) -> ScriptResult | None:
        """The result of a compiler that failed; None where the program can run."""
        if not language.build:
            return None
        command = f"cd {_DIRECTORY} && timeout -s KILL {BUILD_SECONDS:g} {language.build} 2>&1"
        said, _, code = await self.command(
            f"bash -c {shlex.quote(command)}", BUILD_SECONDS + _SLACK_SECONDS
        )
        if code == 0:
            return None
        return ScriptResult(stdout="", stderr=compiler_complaint(said), exit_code=code)

    async def write(self, name: str, text: str) -> None:
        raise NotImplementedError

    async def command(self, text: str, seconds: float) -> tuple[str, str, int]:
        """Output, errors and exit status of a shell command."""
        raise NotImplementedError

    async def end(self) -> None:
        raise NotImplementedError


class _E2BMachine(_Machine):
    async def write(self, name: str, text: str) -> None:
        await _guarded(self.handle.files.write(f"{_DIRECTORY}/{name}", text), _e2b_error)

    async def command(self, text: str, seconds: float) -> tuple[str, str, int]:
        try:
            done = await self.handle.commands.run(text, timeout=math.ceil(seconds))
        except Exception as error:
            # The library raises for an exit status other than 0, which is a result.
            if type(error).__name__ != "CommandExitException":
                raise _e2b_error(error) from error
            done = error
        return done.stdout or "", done.stderr or "", done.exit_code  # type: ignore[union-attr]

    async def end(self) -> None:
        await self.handle.kill()


class _MorphMachine(_Machine):
    async def write(self, name: str, text: str) -> None:
        for command in _uploads(name, text):
            _, stderr, code = await self.command(command, 60.0)
            if code != 0:
                raise ProviderError(f"cannot write {name}: {stderr[:300]}")

    async def command(self, text: str, seconds: float) -> tuple[str, str, int]:
        done = await _guarded(self.handle.aexec(text, timeout=seconds), _morph_error)
        return done.stdout, done.stderr, done.exit_code

    async def end(self) -> None:
        await self.handle.astop()


def _uploads(name: str, text: str) -> Iterator[str]:
    """Commands that write a file. Each may run twice, because a client may repeat a request."""
    data = base64.b64encode(text.encode(errors="surrogatepass")).decode()
    parts = [data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK)] or [""]
    for number, part in enumerate(parts):
        target = f"{_DIRECTORY}/{name}.{number:05d}"
        yield f"mkdir -p {_DIRECTORY} && printf %s {shlex.quote(part)} > {target}"
    yield f"cat {_DIRECTORY}/{name}.[0-9]* | base64 -d > {_DIRECTORY}/{name}"


def _run_command(run: str, seconds: float) -> str:
    """The command that runs a program with ``stdin.txt``, which is deleted before the program
    starts.
    """
    inner = (
        f"cd {_DIRECTORY} && exec 0<stdin.txt && rm -f stdin.txt stdin.txt.* && "
        f"timeout -s KILL {seconds:.3f} {run} 2>stderr.txt | "
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
    """The error for an exception of the library, which is recognised by its name without an
    import.
    """
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
