"""Reward functions by name: those of the package, those that a project registers, and any function
by its import path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from ctrl_megatron.config.import_path import import_callable
from ctrl_megatron.errors import (
    UserError,
    convert_user_code_errors,
    describe_location,
    did_you_mean,
    is_user_defined,
)
from ctrl_megatron.rewards.code_rewards import (
    BinaryCodeReward,
    CodeFormatReward,
    CodeReward,
    IoiCodeReward,
)
from ctrl_megatron.rewards.critic import RewardModelForCritic
from ctrl_megatron.rewards.items import RewardFunction
from ctrl_megatron.rewards.leaks import LeakReward
from ctrl_megatron.rewards.score_function import as_item_reward, is_score_function
from ctrl_megatron.rewards.shaping import (
    OVERLONG,
    DeltaReward,
    EchoGain,
    JudgeGate,
    JudgeReward,
    SoftOverlongPunishment,
    TransitionReward,
)
from ctrl_megatron.rewards.users_reward import UsersReward

MODEL_REWARD = "reward_model"
"""The reward that a model of the run computes (``reward_model.enable``), no function."""
Factory = TypeVar("Factory", bound=Callable[..., Any])

_FACTORIES: dict[str, Callable[..., Any]] = {
    "critic": RewardModelForCritic,
    "code": CodeReward,
    "binary_code": BinaryCodeReward,
    "code_format": CodeFormatReward,
    "ioi_code": IoiCodeReward,
    **dict.fromkeys(OVERLONG, SoftOverlongPunishment),
    "delta": DeltaReward,
    "echo_gain": EchoGain,
    "judge": JudgeReward,
    "leak": LeakReward,
    "judge_gate": JudgeGate,
    "transition": TransitionReward,
}


def register_reward(name: str) -> Callable[[Factory], Factory]:
    """A decorator that registers a factory of reward functions as ``name``. Raises ``UserError``
    for a name that is registered already.
    """

    def register(factory: Factory) -> Factory:
        if name in _FACTORIES:
            raise UserError(f"reward {name!r} is already registered; choose another name")
        _FACTORIES[name] = factory
        return factory

    return register


def get_reward_factory(name: str) -> Callable[..., Any]:
    """The factory registered as ``name``. Raises ``UserError`` that lists the known names."""
    if name not in _FACTORIES:
        hint = did_you_mean(name, _FACTORIES) or ";"
        raise UserError(
            f"unknown reward {name!r}{hint} known: {', '.join(sorted(_FACTORIES))}, and any "
            "function as module:function or FILE.py:function"
        )
    return _FACTORIES[name]


def reward_parameters(name: str) -> frozenset[str]:
    """Names of the parameters of a registered factory; none for an import path."""
    return (
        frozenset()
        if ":" in name
        else frozenset(inspect.signature(get_reward_factory(name)).parameters)
    )


def columns_read_by(name: str) -> tuple[str, ...]:
    """The columns of a row that a reward function reads: the attribute ``reads`` of its factory or
    of the function itself. Raises UserError where ``reads`` is no tuple or list of names.
    """
    reads = getattr(_imported(name) if ":" in name else get_reward_factory(name), "reads", ())
    if not isinstance(reads, (tuple, list)) or not all(isinstance(r, str) for r in reads):
        raise UserError(f"reward {name!r}: reads={reads!r} must be a tuple of column names")
    return tuple(reads)


def make_reward(name: str, **options: Any) -> RewardFunction:
    """The reward function ``name`` with ``options``.

    A name with a colon is an import path, ``module:function`` or ``FILE.py:function``. Its function
    is called with the items and ``options``, may be a coroutine function, and returns one float or
    None per item; or it has the form of verl's ``compute_score`` (``score_function``). Raises
    ``UserError`` for an unknown name and for options that the factory does not accept.
    """
    if ":" in name:
        return UsersReward(name, _imported(name), options)
    factory = get_reward_factory(name)
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise UserError(f"reward {name!r}: {error}") from error
    if not is_user_defined(factory):
        return factory(**options)
    with convert_user_code_errors(
        f"reward {name!r} cannot be made by {describe_location(factory)}"
    ):
        function = factory(**options)
    if not callable(function):
        raise UserError(
            f"reward {name!r}: {describe_location(factory)} returned {function!r}, no function"
        )
    return function if isinstance(function, RewardModelForCritic) else UsersReward(name, function)


def raise_no_rewards(silent: Sequence[str]) -> NoReturn:
    """Raise ``UserError``: no sample of a step or a draw has a reward. ``silent`` names the reward
    functions that returned None for every sample.
    """
    users = [n for n in silent if ":" in n or (n in _FACTORIES and is_user_defined(_FACTORIES[n]))]
    if users:
        raise UserError(
            f"{', '.join(users)} returned None for every item of the step",
            key="reward.reward_funcs",
            remedy="return a number for items whose reward is known",
        )
    if MODEL_REWARD in silent:
        raise UserError(
            "every conversation of the step has more tokens than the reward model reads",
            key="reward_model.max_length",
            remedy="raise it as far as the model's context goes, or shorten prompts and responses "
            "(data.max_prompt_length, data.max_response_length)",
        )
    raise UserError(
        "no sample of the step has a reward: every critique contains the program of its revision "
        "(reward.copying=mask), or leaves the engine no room for one, or could not be judged",
        remedy="raise reward.copying_threshold or actor_rollout_ref.rollout.max_model_len",
    )


def _imported(path: str) -> Callable[..., Any]:
    """The function at ``module:function`` or ``FILE.py:function``; a function in verl's form
    becomes a function of a list of items.
    """
    with convert_user_code_errors(f"cannot import the reward {path!r}"):
        found = import_callable(path, "reward")
    return as_item_reward(path, found) if is_score_function(found) else found
