"""What every provider of code execution offers, what it may need, and the errors it may end in."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

from ctrl_megatron.sandbox.client import SandboxError
from ctrl_megatron.sandbox.wire import EvalResult, SubmitRequest


class ProviderError(SandboxError):
    """The provider failed, after every retry: nothing is known about the program.

    Whoever judges with a provider masks the sample; it is never scored 0. As a kind of
    ``SandboxError`` it needs no handling of its own where a sandbox client is expected.
    """


class ProviderSetupError(ValueError):
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


class CodeProvider(Protocol):
    """Runs a program against tests. It has the face of a sandbox client, so every place that takes
    a judge takes a provider."""

    @property
    def identity(self) -> Any:
        """Plain values that tell apart providers whose verdicts may differ; part of cache keys."""
        ...

    async def submit(self, request: SubmitRequest, /) -> EvalResult:
        """One verdict per test of ``request``.

        Without ``extra.run_all_cases`` the list ends at the first failure. Raises ``ProviderError``
        (or ``SandboxError``) when the provider fails, ``ProviderSetupError`` or ``ValueError`` for
        what it can never do.
        """
        ...

    async def close(self) -> None:
        """Let go of connections; a later call opens new ones."""
        ...


def load_client(provider: str, module: str, package: str) -> Any:
    """A cloud's client library. Raises ``ProviderSetupError`` that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ProviderSetupError(
            f"the provider {provider} needs the package {package}, which cannot be imported "
            f"({error}); pip install 'ctrl_megatron[{provider}]'"
        ) from error


def require_key(provider: str, key: str | None, variable: str) -> str:
    """The key. Raises ``ProviderSetupError`` naming the environment variable."""
    if not key or not key.strip():
        raise ProviderSetupError(
            f"the provider {provider} needs an API key: set the environment variable {variable}"
        )
    return key.strip()
