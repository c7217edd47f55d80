"""Reward models by name: ``critic`` is the paper's; a project may register its own."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeVar

from ctrl_megatron.rewards.critic import RewardModelForCritic

Factory = TypeVar("Factory", bound=Callable[..., Any])

_FACTORIES: dict[str, Callable[..., Any]] = {}


def register_reward(name: str) -> Callable[[Factory], Factory]:
    """Decorator: make a factory available as ``name``; ``ValueError`` if that is taken."""

    def register(factory: Factory) -> Factory:
        if name in _FACTORIES:
            raise ValueError(f"reward {name!r} is already registered; choose another name")
        _FACTORIES[name] = factory
        return factory

    return register


def get_reward(name: str) -> Callable[..., Any]:
    """The factory registered as ``name``. Raises ``ValueError`` listing the known names."""
    if name not in _FACTORIES:
        near = get_close_matches(name, _FACTORIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"unknown reward {name!r}{hint} known: {', '.join(sorted(_FACTORIES))}")
    return _FACTORIES[name]


register_reward("critic")(RewardModelForCritic)
