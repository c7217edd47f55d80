"""The provider ``sandbox_fusion``: any service with SandboxFusion's ``/run_code``.

Upstream's ``/submit`` trusts exit codes (``exit(0)`` passes every assert), so only ``/run_code`` is
used: asserts go through the harness, output is compared here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ctrl_megatron.rewards.providers.contract import (
    ProviderCounters,
    ProviderError,
    ProviderSetupError,
    Script,
    ScriptResult,
)
from ctrl_megatron.sandbox.client import SandboxClient, SandboxError
from ctrl_megatron.sandbox.wire import CommandRunStatus, RunCodeRequest, RunCodeResponse


class SandboxFusionBackend:
    """Scripts by ``/run_code``. The client retries; ``memory_mb`` is each program's limit."""

    name = "sandbox_fusion"
    languages = ("python", "cpp", "nodejs", "go", "java", "bash")
    tests_per_run = None

    def __init__(
        self,
        endpoint: str | Sequence[str] | None = None,
        *,
        memory_mb: int = -1,
        **options: Any,
    ) -> None:
        if endpoint is None:
            raise ProviderSetupError(
                "the provider sandbox_fusion needs endpoint, the URL of a SandboxFusion service "
                "(SANDBOX_FUSION_ENDPOINT)"
            )
        self._client = SandboxClient(endpoint, **options)
        self._memory_mb = memory_mb
        self.identity = {"memory_mb": memory_mb}

    @asynccontextmanager
    async def session(self, counters: ProviderCounters) -> AsyncIterator[SandboxFusionBackend]:
        """Every run is a machine of its own already."""
        yield self

    async def run(self, script: Script) -> ScriptResult:
        request = RunCodeRequest(
            code=script.source,
            language=script.language,
            stdin=script.stdin,
            run_timeout=script.seconds,
            memory_limit_MB=self._memory_mb,
        )
        try:
            return _result(await self._client.run_code(request))
        except SandboxError as error:
            raise ProviderError(str(error)) from error
        except ValueError as error:
            raise ProviderSetupError(f"provider {self.name}: {error}") from error

    async def close(self) -> None:
        """Close the client's connections."""
        await self._client.close()


def _result(response: RunCodeResponse) -> ScriptResult:
    run = response.run_result
    if run is None:  # a program that does not compile is never run
        compiled = response.compile_result
        if compiled is None:
            raise ProviderError(f"the answer has no result at all: {response.message[:300]}")
        return ScriptResult(stdout="", stderr=compiled.stderr or "", exit_code=1)
    return ScriptResult(
        stdout=run.stdout or "",
        stderr=run.stderr or "",
        exit_code=run.return_code,
        timed_out=run.status is CommandRunStatus.TIME_LIMIT_EXCEEDED,
    )
