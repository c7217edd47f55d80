"""The provider ``local``: our own sandbox, whose judge runs outside the reach of the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctrl_megatron.rewards.providers.contract import ProviderSetupError
from ctrl_megatron.sandbox.client import ClientCounters, SandboxClient
from ctrl_megatron.sandbox.wire import EvalResult, SubmitRequest


class LocalProvider:
    """Judges by ``/submit`` of a running sandbox service of ours.

    ``endpoint`` names it (one or several URLs) or ``client`` speaks to it; ``limits`` are the
    service's, as plain values, for cache keys. Every data set kind that the service knows works.
    """

    name = "local"

    def __init__(
        self,
        *,
        endpoint: str | Sequence[str] | None = None,
        client: SandboxClient | None = None,
        limits: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if (endpoint is None) == (client is None):
            raise ProviderSetupError(
                "the provider local needs either endpoint (sandbox.endpoint, or that of the "
                "sandbox which the run starts) or client"
            )
        if client is None:
            assert endpoint is not None
            client = SandboxClient(endpoint, **options)
        elif options:
            raise ProviderSetupError(f"give {', '.join(options)} to the client itself")
        self._client = client
        self._limits = dict(limits or {})

    @property
    def identity(self) -> Mapping[str, Any]:
        """Name and limits; not the endpoint, which is another one in every run."""
        return {"provider": self.name, "limits": self._limits}

    @property
    def counters(self) -> ClientCounters:
        """The client's."""
        return self._client.counters

    async def submit(self, request: SubmitRequest) -> EvalResult:
        """See ``CodeProvider.submit``."""
        return await self._client.submit(request)

    async def close(self) -> None:
        """Close the client's connections."""
        await self._client.close()
