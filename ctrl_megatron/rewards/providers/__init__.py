"""Where programs run against tests: our sandbox, or somebody else's, behind one interface."""

from ctrl_megatron.rewards.providers.contract import (
    CodeProvider,
    ProviderCounters,
    ProviderError,
    ProviderSetupError,
)
from ctrl_megatron.rewards.providers.factory import PROVIDERS, make_provider
from ctrl_megatron.rewards.providers.local import LocalProvider
from ctrl_megatron.rewards.providers.scripts import ScriptProvider

__all__ = [
    "PROVIDERS",
    "CodeProvider",
    "LocalProvider",
    "ProviderCounters",
    "ProviderError",
    "ProviderSetupError",
    "ScriptProvider",
    "make_provider",
]
