"""Providers by name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from ctrl_megatron.rewards.providers.contract import CodeProvider, ProviderSetupError
from ctrl_megatron.rewards.providers.local import LocalProvider
from ctrl_megatron.rewards.providers.scripts import ScriptProvider

_HERE = "ctrl_megatron.rewards.providers"
_BACKENDS = {
    "sandbox_fusion": ("sandbox_fusion", "SandboxFusionBackend"),
    "e2b": ("e2b", "E2BBackend"),
    "morph": ("morph", "MorphBackend"),
    "piston": ("piston", "PistonBackend"),
}
_PROVIDER_OPTIONS = ("attempts", "backoff", "max_concurrency")
PROVIDERS = ("local", *_BACKENDS)
"""Names that ``make_provider`` takes."""


def make_provider(name: str, **options: Any) -> CodeProvider:
    """The provider called ``name``.

    ``attempts``, ``backoff`` (seconds) and ``max_concurrency`` work for all; the other options are
    those of the class: ``LocalProvider``, ``SandboxFusionBackend``, ``E2BBackend``,
    ``MorphBackend``, ``PistonBackend``. Keys are options too: environment variables are read
    elsewhere. Raises ``ProviderSetupError`` for an unknown name or option, a missing key or
    package.
    """
    if name == "local":
        return _made(name, LocalProvider, options)
    if name not in _BACKENDS:
        near = get_close_matches(name, PROVIDERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ProviderSetupError(f"unknown provider {name!r}{hint} known: {', '.join(PROVIDERS)}")
    module, kind = _BACKENDS[name]
    shared = {key: options.pop(key) for key in _PROVIDER_OPTIONS if key in options}
    if name == "sandbox_fusion":
        # Its client retries each request by itself and has its own limit of requests on the wire.
        options |= {key: shared[key] for key in ("attempts", "backoff") if key in shared}
        shared = {"attempts": 1, "max_concurrency": shared.get("max_concurrency", 256)}
    backend = _made(name, getattr(import_module(f"{_HERE}.{module}"), kind), options)
    return ScriptProvider(backend, **shared)


def _made(name: str, kind: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        return kind(**options)
    except TypeError as error:
        raise ProviderSetupError(f"provider {name}: {error}") from error
