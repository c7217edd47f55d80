"""The provider ``morph``: one MorphCloud instance per request, through Morph's client library."""

from __future__ import annotations

import asyncio
import logging
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
_REFUSED = (401, 403)
_OUR_FAULT = (400, 404, 422)


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
    async def session(self, counters: ProviderCounters) -> AsyncIterator[_MorphSession]:
        """An instance of its own, stopped at the end."""
        instance = await _guarded(
            self._client.instances.astart(
                self._snapshot_id,
                ttl_seconds=self._lifetime,
                ttl_action="stop",
                timeout=self._start_seconds,
            )
        )
        session = _MorphSession(instance)
        try:
            if not self._probed:
                await session.probe()
                self._probed = True
            yield session
        finally:
            await _end(instance, counters)

    async def close(self) -> None:
        """Nothing: the library keeps its own connections."""


class _MorphSession:
    def __init__(self, instance: Any) -> None:
        self._instance = instance

    async def probe(self) -> None:
        done = await _guarded(self._instance.aexec(shell.probe(), timeout=30.0))
        if missing := done.stdout.split():
            raise ProviderSetupError(f"the Morph snapshot lacks {', '.join(missing)}")

    async def run(self, script: Script) -> ScriptResult:
        """See ``ScriptSession.run``."""
        for name, text in (("main.py", script.source), ("stdin.txt", script.stdin)):
            for command in shell.uploads(_DIRECTORY, name, text):
                sent = await _guarded(self._instance.aexec(command, timeout=60.0))
                if sent.exit_code != 0:
                    raise ProviderError(f"cannot write {name}: {sent.stderr[:300]}")
        command = shell.run_command(_DIRECTORY, script.seconds)
        done = await _guarded(self._instance.aexec(command, timeout=shell.slack(script)))
        return shell.result_of(done.stdout, done.stderr, done.exit_code)


async def _guarded(call: Awaitable[Value]) -> Value:
    try:
        return await call
    except Exception as error:
        status = getattr(error, "status_code", None)
        told = f"{type(error).__name__}: {error}"[:500]
        if status in _REFUSED:
            raise ProviderSetupError(
                f"Morph refused the API key (MORPH_API_KEY): {told}"
            ) from error
        if status in _OUR_FAULT:
            raise ProviderSetupError(f"Morph refused the request: {told}") from error
        raise ProviderError(told) from error


async def _end(instance: Any, counters: ProviderCounters) -> None:
    try:
        # Shielded: a cancelled caller must not leave a paid machine running.
        await asyncio.shield(instance.astop())
    except Exception as error:
        counters.left_open += 1
        _log.warning("a Morph instance could not be stopped and lives on for a while: %s", error)
