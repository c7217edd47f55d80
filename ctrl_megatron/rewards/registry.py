"""Reward functions by name: those of the package, those a project registers, and any function by
its import path.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from ctrl_megatron.config.import_path import imported
from ctrl_megatron.errors import UserError, did_you_mean, is_users, place_of, users_code
from ctrl_megatron.rewards.code_rewards import (
    BinaryCodeReward,
    CodeFormatReward,
    CodeReward,
    IoiCodeReward,
)
from ctrl_megatron.rewards.critic import RewardModelForCritic
from ctrl_megatron.rewards.items import (
    RewardFunction,
    RewardItem,
    Rewards,
    checked_rewards,
)
from ctrl_megatron.rewards.score_function import is_score_function, per_item
from ctrl_megatron.rewards.shaping import (
    OVERLONG,
    JudgmentReward,
    SoftOverlongPunishment,
    TransitionReward,
)

Factory = TypeVar("Factory", bound=Callable[..., Any])

_FACTORIES: dict[str, Callable[..., Any]] = {
    "critic": RewardModelForCritic,
    "code": CodeReward,
    "binary_code": BinaryCodeReward,
    "code_format": CodeFormatReward,
    "ioi_code": IoiCodeReward,
    **dict.fromkeys(OVERLONG, SoftOverlongPunishment),
    "judgment": JudgmentReward,
    "transition": TransitionReward,
}


def register_reward(name: str) -> Callable[[Factory], Factory]:
    """Decorator: make a factory of reward functions available as ``name``; ``ValueError`` if that
    is taken.
    """

    def register(factory: Factory) -> Factory:
        if name in _FACTORIES:
            raise UserError(f"reward {name!r} is already registered; choose another name")
        _FACTORIES[name] = factory
        return factory

    return register


def get_reward(name: str) -> Callable[..., Any]:
    """The factory registered as ``name``. Raises ``ValueError`` listing the known names."""
    if name not in _FACTORIES:
        hint = did_you_mean(name, _FACTORIES) or ";"
        raise UserError(
            f"unknown reward {name!r}{hint} known: {', '.join(sorted(_FACTORIES))}, and any "
            "function as module:function or FILE.py:function"
        )
    return _FACTORIES[name]


def reward_parameters(name: str) -> frozenset[str]:
    """Names of the options of a registered reward; none of a ``module:function``."""
    return frozenset() if ":" in name else frozenset(inspect.signature(get_reward(name)).parameters)


def columns_read_by(name: str) -> tuple[str, ...]:
    """The columns of its row that a reward reads, as its attribute ``reads`` says; a function of
    the user's may have one too. UserError if it is no tuple or list of names.
    """
    reads = getattr(_imported(name) if ":" in name else get_reward(name), "reads", ())
    if not isinstance(reads, (tuple, list)) or not all(isinstance(r, str) for r in reads):
        raise UserError(f"reward {name!r}: reads={reads!r} must be a tuple of column names")
    return tuple(reads)


def make_reward(name: str, **options: Any) -> RewardFunction:
    """The reward function called ``name``, made with ``options``.

    A name with a colon is an import path, ``module:function`` or ``FILE.py:function``: the function
    is called with the items and ``options``, may be a coroutine, and gives one float or None per
    item; or it is verl's ``compute_score`` (``score_function``). Raises ``ValueError`` for a name
    that does not exist and for options that do not fit.
    """
    if ":" in name:
        return UsersReward(name, _imported(name), options)
    factory = get_reward(name)
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise UserError(f"reward {name!r}: {error}") from error
    if not is_users(factory):
        return factory(**options)
    with users_code(f"reward {name!r} cannot be made by {place_of(factory)}"):
        function = factory(**options)
    if not callable(function):
        raise UserError(f"reward {name!r}: {place_of(factory)} gave {function!r}, no function")
    return function if isinstance(function, RewardModelForCritic) else UsersReward(name, function)


class UsersReward:
    """A function of the user's: its faults are told with its name and its place.

    One that is a coroutine function and stands at an import path runs on an event loop that all
    such functions share, so that one which blocks keeps nobody from engine and sandbox. Raises
    ``UserError`` for a function that cannot be called with the items and ``options``.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], options: Mapping[str, Any] | None = None
    ) -> None:
        self.name, self._function, self._options = name, function, dict(options or {})
        self.place = place_of(function)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  what it is, not whether it is there
        )
        try:
            inspect.signature(function).bind([], **self._options)
        except ValueError:
            return  # written in C: it says nothing about its arguments
        except TypeError as error:
            given = "".join(f", {option}=..." for option in self._options)
            raise UserError(
                f"reward {name!r}: {self.place} cannot be called as (items{given}): {error}",
                remedy="let it take the list of items, and its entries of reward.reward_options "
                "by their names",
            ) from error

    async def __call__(self, items: Sequence[RewardItem]) -> Rewards:
        """See ``RewardFunction``. Raises ``UserError`` for what the function raises, and for an
        answer that is not one reward per item.
        """
        if self._is_async and ":" in self.name:
            call = asyncio.run_coroutine_threadsafe(self._call(items), _users_loop())
            return await asyncio.wrap_future(call)
        return await self._call(items)

    async def _call(self, items: Sequence[RewardItem]) -> Rewards:
        with users_code(f"reward {self.name!r} ({self.place}) failed"):
            if self._is_async:
                given = await self._function(items, **self._options)
            else:
                # Engine and sandbox are spoken to on this loop meanwhile.
                given = await asyncio.to_thread(self._function, items, **self._options)
                given = await given if inspect.isawaitable(given) else given
            return checked_rewards(f"{self.name!r} ({self.place})", given, len(items))


@cache
def _users_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop


# A forked process has no thread that runs it.
os.register_at_fork(after_in_child=_users_loop.cache_clear)


def _imported(path: str) -> Callable[..., Any]:
    """The function at ``module:function`` or ``FILE.py:function``; verl's ``compute_score`` becomes
    a function of all items.
    """
    with users_code(f"cannot import the reward {path!r}"):
        found = imported(path, "reward")
    return per_item(path, found) if is_score_function(found) else found
