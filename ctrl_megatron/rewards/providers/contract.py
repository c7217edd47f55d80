"""What a machine for scripts must offer a provider, and the errors it may end in."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from ctrl_megatron.errors import UserError
from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.sandbox.wire import (
    CommandRunResult,
    CommandRunStatus,
    EvalTestCase,
    RunCodeResponse,
    RunStatus,
)


class ProviderError(SandboxError):
    """The provider failed, after every retry: nothing is known about the program.

    Whoever judges with a provider masks the sample; it is never scored 0. As a kind of
    ``SandboxError`` it needs no handling of its own where a sandbox client is expected.
    """


class ProviderSetupError(UserError):
    """The provider cannot work as it is set up: a missing package or key, a refused key, a request
    beyond the provider's limits. Retrying would not help, so it should end the run."""


@dataclass(slots=True)
class ProviderCounters:
    """What a provider did so far."""

    requests: int = 0
    """Calls of ``submit``."""
    retries: int = 0
    """Attempts beyond the first of each call."""
    failures: int = 0
    """Calls that ended in ``ProviderError``."""
    compared_outside: int = 0
    """Tests whose expected value stayed with us: the program cannot pass them by forging."""
    asserted_inside: int = 0
    """Tests that ran in the program's own process, guarded by a nonce only."""
    left_open: int = 0
    """Remote machines whose removal failed; they end by their own time to live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One program to run once."""

    source: str
    stdin: str
    seconds: float
    """Wall clock."""
    language: str = "python"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptResult:
    """What a program did. A fault of the provider is ``ProviderError``, never a result."""

    stdout: str
    stderr: str = ""
    exit_code: int | None = None
    """None after a time-out or a signal whose number is unknown."""
    timed_out: bool = False
    cut_at: int | None = None
    """The program wrote more than this many characters; some or all of its output is missing."""

    @property
    def failure(self) -> str:
        """The exit status and the last line of the errors."""
        last_line = self.stderr.strip().rpartition("\n")[2]
        return f"exit status {self.exit_code}: {last_line}"[:400]


class ScriptSession(Protocol):
    """One machine, for the scripts of one request."""

    async def run(self, script: Script) -> ScriptResult:
        """Run a script to its end. Raises ``ProviderError`` and ``ProviderSetupError``."""
        ...


class ScriptBackend(Protocol):
    """Where scripts run."""

    name: str
    languages: tuple[str, ...]
    tests_per_run: int | None
    """Tests of a function problem that one run may take; None for all of them."""
    identity: Mapping[str, Any]
    """Plain values that may change verdicts."""

    def session(self, counters: ProviderCounters) -> AbstractAsyncContextManager[ScriptSession]:
        """A machine of its own for one request, taken away at the end."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


def judged(passed: bool, reason: str = "", *, timed_out: bool = False) -> EvalTestCase:
    """The verdict on one test."""
    status = CommandRunStatus.TIME_LIMIT_EXCEEDED if timed_out else CommandRunStatus.FINISHED
    run = CommandRunResult(status=status, return_code=None if timed_out else int(not passed))
    outcome = RunStatus.SUCCESS if passed else RunStatus.FAILED
    return EvalTestCase(
        passed=passed,
        exec_info=RunCodeResponse(status=outcome, run_result=run),
        test_info={"reason": reason},
    )
