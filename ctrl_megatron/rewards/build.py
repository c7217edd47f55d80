"""The reward functions of a plan, made, with the judge and the cache that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ctrl_megatron.config import Config
from ctrl_megatron.config.environment import read_provider_keys
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError, all_of, users_input
from ctrl_megatron.rewards.cache import VerdictCache
from ctrl_megatron.rewards.plan import RewardPlan, plan_rewards
from ctrl_megatron.rewards.providers import ScriptProvider, make_provider
from ctrl_megatron.rewards.registry import make_reward, reward_parameters
from ctrl_megatron.rewards.reward_sum import RewardSum
from ctrl_megatron.rewards.users_reward import UsersReward
from ctrl_megatron.sandbox import SandboxClient
from ctrl_megatron.sandbox.access import read_token


def build_reward_sum(
    config: Config,
    plan: RewardPlan,
    *,
    sandbox_endpoint: str,
    sandbox_token: str | None = None,
    rows: Sequence[Row],
    tokenizer: Any,
) -> RewardSum:
    """The functions of ``plan``, which share one judge and one cache of verdicts.

    ``rows`` are those of training and validation together. Raises
    ``UserError`` for different rows with one id, and for an option, key, package or cache file that
    cannot be used.
    """
    judge = code_judge(config, sandbox_endpoint, sandbox_token) if plan.runs_programs else None
    cache = VerdictCache(config.reward.cache_path)
    judged = plan.functions["critic"].of(rows) if "critic" in plan.functions else rows
    of_critic = {"file": judged, "tokenizer": tokenizer, "sandbox": judge, "cache": cache}
    of_others = {"provider": judge, "cache": cache}
    functions = {}
    for name, planned in plan.called.items():
        shared = of_critic if name == "critic" else _accepted(name, of_others)
        functions[name] = made = make_reward(name, **shared, **planned.options)
        if isinstance(made, UsersReward):
            made.seconds = config.reward.function_timeout
    tasks = {name: planned.tasks for name, planned in plan.called.items() if planned.tasks}
    weights = {name: planned.weight for name, planned in plan.called.items()}
    return RewardSum(functions, weights, judge=judge, tasks=tasks)


def check_rewards(config: Config) -> None:
    """Raise ``UserError`` for a wrong name, option or import path of a reward function, and for a
    missing key, package or file of the judge. Needs no service.
    """
    key = "reward.provider" if config.reward.provider != "local" else "sandbox"
    key = "sandbox.token_file" if key == "sandbox" and config.sandbox.token_file else key
    problems = []
    for name, check in (
        ("reward.reward_funcs", lambda: _make_without_judge(plan_rewards(config))),
        (key, lambda: code_judge(config, config.sandbox.endpoint or "http://127.0.0.1")),
    ):
        try:
            with users_input(name):
                check()
        except UserError as error:
            problems.append(error)
    all_of(problems)


def code_judge(
    config: Config, sandbox_endpoint: str, sandbox_token: str | None = None
) -> SandboxClient | ScriptProvider:
    """The configured service that runs programs.

    ``sandbox_token`` is the token of the run's own sandboxes; the token of another service is in
    ``sandbox.token_file``. Raises ``UserError`` that names a missing key, package or option.
    """
    name, file = config.reward.provider, config.sandbox.token_file
    if name == "local":
        options = {
            "endpoint": sandbox_endpoint,
            "token": sandbox_token if file is None else read_token(file),
        }
    else:
        options = {**read_provider_keys(name), **config.reward.provider_options}
    reward = config.reward
    shared = {"max_concurrency": reward.max_requests, "silence": reward.request_timeout}
    return make_provider(name, **{**shared, **options})


def _make_without_judge(plan: RewardPlan) -> None:
    """Make every function but ``critic``, so that mistakes in options are found."""
    for name, planned in plan.called.items():
        if name != "critic":
            nothing = _accepted(name, {"provider": None, "cache": None})
            make_reward(name, **nothing, **planned.options)


def _accepted(name: str, shared: dict[str, Any]) -> dict[str, Any]:
    parameters = reward_parameters(name)
    return {key: value for key, value in shared.items() if key in parameters}
