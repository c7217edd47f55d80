"""Providers, which run programs against tests: the own sandbox and other services, behind one
interface.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ctrl_megatron.errors import did_you_mean
from ctrl_megatron.rewards.providers.cloud import E2BBackend, MorphBackend
from ctrl_megatron.rewards.providers.contract import (
    ProviderCounters,
    ProviderError,
    ProviderSetupError,
)
from ctrl_megatron.rewards.providers.e2b_router import E2BRouterBackend
from ctrl_megatron.rewards.providers.sandbox_fusion import SandboxFusionBackend
from ctrl_megatron.rewards.providers.scripts import ScriptProvider
from ctrl_megatron.sandbox.client import SandboxClient


def _e2b(**options: Any) -> E2BBackend | E2BRouterBackend:
    """E2B's own service, or a router in front of it, which needs no key here."""
    if "e2b_router_url" not in options:
        return E2BBackend(**options)
    options.pop("api_key", None)
    return E2BRouterBackend(**options)


_BACKENDS: dict[str, Callable[..., Any]] = {
    "sandbox_fusion": SandboxFusionBackend,
    "e2b": _e2b,
    "morph": MorphBackend,
}
_PROVIDER_OPTIONS = ("attempts", "backoff", "max_concurrency", "silence")
PROVIDERS = ("local", *_BACKENDS)
"""Names that ``make_provider`` accepts."""

__all__ = [
    "PROVIDERS",
    "ProviderCounters",
    "ProviderError",
    "ProviderSetupError",
    "ScriptProvider",
    "make_provider",
]


def make_provider(name: str, **options: Any) -> ScriptProvider | SandboxClient:
    """The provider ``name``.

    All providers accept ``attempts``, ``backoff`` and ``silence`` (seconds) and
    ``max_concurrency``. The other
    options are those of ``SandboxClient`` (for ``local``, the own service, whose judge no program
    can reach), ``SandboxFusionBackend``, ``E2BBackend`` (with ``e2b_router_url``:
    ``E2BRouterBackend``) and ``MorphBackend``.
    API keys are options too: no environment variable is read here. Raises ``ProviderSetupError``
    for an unknown name or option and for a missing key or package.
    """
    if name == "local":
        return _made(name, SandboxClient, options)
    if name not in _BACKENDS:
        hint = did_you_mean(name, PROVIDERS) or ";"
        raise ProviderSetupError(f"unknown provider {name!r}{hint} known: {', '.join(PROVIDERS)}")
    shared = {key: options.pop(key) for key in _PROVIDER_OPTIONS if key in options}
    if name == "sandbox_fusion":
        # Its client repeats failed requests and limits the requests at the same time.
        own = ("attempts", "backoff", "silence")
        options |= {key: shared[key] for key in own if key in shared}
        limit = shared.get("max_concurrency", 256)
        shared = {"attempts": 1, "max_concurrency": limit, "silence": math.inf}
    return ScriptProvider(_made(name, _BACKENDS[name], options), **shared)


def _made(name: str, kind: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        return kind(**options)
    except TypeError as error:
        raise ProviderSetupError(f"provider {name}: {error}") from error
