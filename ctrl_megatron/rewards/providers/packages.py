"""Optional client libraries, imported when a provider that needs one is made."""

from __future__ import annotations

import importlib
from typing import Any

from ctrl_megatron.rewards.providers.contract import ProviderSetupError


def load_client(provider: str, module: str, package: str) -> Any:
    """The client library's module. Raises ``ProviderSetupError`` that says what to install."""
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
