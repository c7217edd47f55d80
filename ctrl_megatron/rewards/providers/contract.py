"""The interface of a machine that runs scripts for a provider, and the errors of providers."""

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
    """The provider failed in every attempt, so that there is no verdict on the program.

    Callers mask the sample out and never score it 0. It is a ``SandboxError``, so code that handles
    failures of a sandbox client handles it too.
    """


class ProviderSetupError(UserError):
    """The provider's set-up is wrong: a missing package or key, a refused key, or a request beyond
    the provider's limits. Another attempt would fail too, so it ends the run."""


@dataclass(slots=True)
class ProviderCounters:
    """Counts of what a provider did."""

    requests: int = 0
    """Calls of ``submit``."""
    retries: int = 0
    """Attempts beyond the first of each call."""
    failures: int = 0
    """Calls that ended in ``ProviderError``."""
    compared_outside: int = 0
    """Tests whose expected value was not sent: no program can forge their verdicts."""
    asserted_inside: int = 0
    """Tests that ran in the program's own process, whose verdicts only a nonce protects."""
    left_open: int = 0
    """Remote machines whose removal failed; they end at their time to live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One program to run once."""

    source: str
    stdin: str
    seconds: float
    """Limit of the wall clock."""
    language: str = "python"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptResult:
    """The result of a program. A failure of the provider is a ``ProviderError``, never a result."""

    stdout: str
    stderr: str = ""
    exit_code: int | None = None
    """None after a time-out or a signal whose number is unknown."""
    timed_out: bool = False
    cut_at: int | None = None
    """Limit in characters that the output exceeded, so that a part of it is missing; None where it
    is complete."""

    @property
    def failure(self) -> str:
        """The exit status and the last line of stderr."""
        last_line = self.stderr.strip().rpartition("\n")[2]
        return f"exit status {self.exit_code}: {last_line}"[:400]


class ScriptSession(Protocol):
    """One machine for the scripts of one request."""

    async def run(self, script: Script) -> ScriptResult:
        """Run a script to its end. Raises ``ProviderError`` and ``ProviderSetupError``."""
        ...


class ScriptBackend(Protocol):
    """A service that runs scripts."""

    name: str
    languages: tuple[str, ...]
    tests_per_run: int | None
    """Greatest number of tests of a function problem in one run; None for no limit."""
    identity: Mapping[str, Any]
    """Properties of the service that may change verdicts, as plain values."""

    def session(self, counters: ProviderCounters) -> AbstractAsyncContextManager[ScriptSession]:
        """A machine for one request, which is removed at the end."""
        ...

    async def close(self) -> None: ...


def case_verdict(passed: bool, reason: str = "", *, timed_out: bool = False) -> EvalTestCase:
    status = CommandRunStatus.TIME_LIMIT_EXCEEDED if timed_out else CommandRunStatus.FINISHED
    run = CommandRunResult(status=status, return_code=None if timed_out else int(not passed))
    outcome = RunStatus.SUCCESS if passed else RunStatus.FAILED
    return EvalTestCase(
        passed=passed,
        exec_info=RunCodeResponse(status=outcome, run_result=run),
        test_info={"reason": reason},
    )
