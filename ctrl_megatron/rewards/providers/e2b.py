"""The provider ``e2b``: one E2B cloud sandbox per request, through E2B's own client library."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from ctrl_megatron.rewards.providers import shell
from ctrl_megatron.rewards.providers.contract import (
    ProviderCounters,
    ProviderError,
    ProviderSetupError,
)
from ctrl_megatron.rewards.providers.packages import load_client, require_key
from ctrl_megatron.rewards.providers.scripts import Script, ScriptResult

Value = TypeVar("Value")
_log = logging.getLogger(__name__)
_DIRECTORY = "/tmp/job"


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
    async def session(self, counters: ProviderCounters) -> AsyncIterator[_E2BSession]:
        """A sandbox of its own, killed at the end."""
        sandbox = await _guarded(
            self._create(
                template=self._template,
                timeout=self._lifetime,
                allow_internet_access=False,
                **self._options,
            )
        )
        session = _E2BSession(sandbox)
        try:
            if not self._probed:
                await session.probe()
                self._probed = True
            yield session
        finally:
            await _end(sandbox, counters)

    async def close(self) -> None:
        """Nothing: the library keeps its own connections."""


class _E2BSession:
    def __init__(self, sandbox: Any) -> None:
        self._sandbox = sandbox

    async def probe(self) -> None:
        stdout, _, _ = await self._command(shell.probe(), 30.0)
        if missing := stdout.split():
            raise ProviderSetupError(
                f"the E2B template lacks {', '.join(missing)}; choose one with bash, Python 3 and "
                "coreutils"
            )

    async def run(self, script: Script) -> ScriptResult:
        """See ``ScriptSession.run``."""
        files = self._sandbox.files
        for name, text in (("main.py", script.source), ("stdin.txt", script.stdin)):
            await _guarded(files.write(f"{_DIRECTORY}/{name}", text))
        command = shell.run_command(_DIRECTORY, script.seconds)
        return shell.result_of(*await self._command(command, shell.slack(script)))

    async def _command(self, command: str, seconds: float) -> tuple[str, str, int]:
        try:
            done = await self._sandbox.commands.run(command, timeout=math.ceil(seconds))
        except Exception as error:
            # The library raises for a non-zero exit status, which is a result.
            if type(error).__name__ != "CommandExitException":
                raise _translated(error) from error
            done = error
        return done.stdout or "", done.stderr or "", done.exit_code  # type: ignore[union-attr]


async def _guarded(call: Awaitable[Value]) -> Value:
    try:
        return await call
    except Exception as error:
        raise _translated(error) from error


def _translated(error: Exception) -> Exception:
    """The library's exceptions by name, so that the library need not be imported to read them."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    told = f"{type(error).__name__}: {error}"[:500]
    if "AuthenticationException" in kinds:
        return ProviderSetupError(f"E2B refused the API key (E2B_API_KEY): {told}")
    if kinds & {"InvalidArgumentException", "TemplateException"}:
        return ProviderSetupError(f"E2B refused the request: {told}")
    return ProviderError(told)


async def _end(sandbox: Any, counters: ProviderCounters) -> None:
    try:
        # Shielded: a cancelled caller must not leave a paid machine running.
        await asyncio.shield(sandbox.kill())
    except Exception as error:
        counters.left_open += 1
        _log.warning("an E2B sandbox could not be killed and lives on for a while: %s", error)
