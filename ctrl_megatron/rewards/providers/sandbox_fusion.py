"""The provider ``sandbox_fusion``: a service with SandboxFusion's ``/run_code``.

Only ``/run_code`` is used, because upstream's ``/submit`` trusts exit codes (``exit(0)`` passes
every assert): asserts run in the harness, and output is compared here.
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
    """Runs scripts by ``/run_code``. The client repeats failed requests; ``memory_mb`` limits
    each program's memory.
    """

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
        """The service: it runs every script separately."""
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
        await self._client.close()


def _result(response: RunCodeResponse) -> ScriptResult:
    """The result in an answer. Raises ``ProviderError`` where it does not say how the program
    ended.
    """
    compiled, run = response.compile_result, response.run_result
    stages = [stage for stage in (compiled, run) if stage is not None]
    for stage in stages:
        finished = stage.status is CommandRunStatus.FINISHED
        if stage.status is CommandRunStatus.ERROR or (finished and stage.return_code is None):
            raise ProviderError(
                f"the service could not run a command: status {stage.status}, return code "
                f"{stage.return_code}: {(stage.stderr or response.message)[:300]}"
            )
    # A program that does not compile does not run.
    failed = next((stage for stage in stages if stage.return_code != 0), run)
    if failed is None:
        raise ProviderError(f"the answer has no result of a run: {response.message[:300]}")
    return ScriptResult(
        stdout=(failed.stdout or "") if failed is run else "",
        stderr=failed.stderr or "",
        exit_code=failed.return_code,
        timed_out=failed.status is CommandRunStatus.TIME_LIMIT_EXCEEDED,
    )
