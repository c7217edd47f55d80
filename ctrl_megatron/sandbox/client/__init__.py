"""The trainer's side: the client of the service, and the service started as a child process."""

from ctrl_megatron.sandbox.client.sandbox_client import (
    ClientCounters,
    RequestRefused,
    SandboxClient,
    SandboxError,
    SandboxSilent,
)

__all__ = ["ClientCounters", "RequestRefused", "SandboxClient", "SandboxError", "SandboxSilent"]
