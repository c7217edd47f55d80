"""Runs and judges untrusted programs: the service, its isolation and graders, and the asynchronous
client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctrl_megatron.sandbox.client import ClientCounters, SandboxClient, SandboxError
    from ctrl_megatron.sandbox.client.embedded import EmbeddedSandbox
    from ctrl_megatron.sandbox.limits import SandboxLimits
    from ctrl_megatron.sandbox.wire import (
        EvalResult,
        RunCodeRequest,
        RunCodeResponse,
        SubmitRequest,
    )

__all__ = [
    "ClientCounters",
    "EmbeddedSandbox",
    "EvalResult",
    "RunCodeRequest",
    "RunCodeResponse",
    "SandboxClient",
    "SandboxError",
    "SandboxLimits",
    "SubmitRequest",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: the jail's processes import from this package and must load the
    # standard library only.
    if name in __all__:
        for home in ("limits", "wire", "client", "client.embedded"):
            module = import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
