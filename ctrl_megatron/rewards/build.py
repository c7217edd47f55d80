"""From the configuration to the reward functions of a run and their sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ctrl_megatron.config import Config
from ctrl_megatron.config.environment import read_provider_keys
from ctrl_megatron.data.rows import Row, require_columns
from ctrl_megatron.errors import UserError, all_of, users_input
from ctrl_megatron.rewards.cache import VerdictCache
from ctrl_megatron.rewards.critic import RewardModelForCritic
from ctrl_megatron.rewards.grading import Judge
from ctrl_megatron.rewards.providers import ScriptProvider, make_provider
from ctrl_megatron.rewards.registry import columns_read_by, make_reward, reward_parameters
from ctrl_megatron.rewards.reward_sum import RewardFunction, RewardSum
from ctrl_megatron.sandbox import SandboxClient
from ctrl_megatron.sandbox.access import read_token


def reward_functions_of(config: Config, measured: Sequence[str] | None = ()) -> dict[str, float]:
    """Every reward function that the configuration asks for, with its weight.

    In the order of the sum: ``critic``, the others of ``reward.reward_funcs``, ``overlong``
    (``reward.overlong_buffer``), ``judgment`` (``reward.judgment_weight``), ``transition``
    (``reward.transition``).

    ``measured`` names functions that run in any case, with weight 0 where nothing asks for them; so
    does ``critic`` where ``transition`` reads it. None says that no step of the run reads rewards:
    then there is no function. Raises ``ValueError`` for a function that is
    asked for in two ways.
    """
    if measured is None:
        return {}
    reward = config.reward
    terms: dict[str, float] = {}
    if reward.overlong_buffer.enable:
        terms["overlong"] = reward.overlong_buffer.penalty_factor
    if reward.judgment_weight:
        terms["judgment"] = reward.judgment_weight
    if reward.transition.is_on:
        terms["transition"] = 1.0
    if twice := sorted(reward.weights.keys() & terms.keys()):
        raise UserError(
            f"reward.reward_funcs names {twice[0]!r}, which keys of its own turn on as well; leave "
            "one of them out"
        )
    asked = {**reward.weights, **terms}
    needed = (*measured, *(("critic",) if "transition" in asked else ()))
    weights = {**dict.fromkeys(needed, 0.0), **asked}
    return dict(sorted(weights.items(), key=lambda item: item[0] != "critic"))


def runs_programs(config: Config, measured: Sequence[str] | None = ()) -> bool:
    """Whether one of the run's functions asks a sandbox or another provider to run programs."""
    return any(
        name == "critic" or "provider" in reward_parameters(name)
        for name in reward_functions_of(config, measured)
    )


def build_reward_sum(
    config: Config,
    *,
    sandbox_endpoint: str,
    sandbox_token: str | None = None,
    rows: Sequence[Row],
    tokenizer: Any,
    measured: Sequence[str] | None = (),
) -> RewardSum:
    """The configured functions, which share one judge and one memory of verdicts.

    ``rows`` are those that ``critic`` may be asked about: of training and validation together.
    ``measured``: see ``reward_functions_of``. Raises ``ValueError`` for different rows with one id
    and for a wrong name, option, import path, key, package or cache file.
    """
    judge = None
    if runs_programs(config, measured):
        judge = code_judge(config, sandbox_endpoint, sandbox_token)
    cache = VerdictCache(config.reward.cache_path)
    weights = reward_functions_of(config, measured)
    functions = _functions(config, weights, judge, cache)
    if "critic" in weights:
        functions["critic"] = RewardModelForCritic(
            rows,
            tokenizer,
            run_all_cases=config.reward.run_all_cases,
            max_requests=config.reward.max_requests,
            run_timeout=config.reward.run_timeout,
            sandbox=judge,
            show_progress=False,
            cache=cache,
            copying=config.reward.copying,
            copying_threshold=config.reward.copying_threshold,
        )
    return RewardSum({name: functions[name] for name in weights}, weights, judge=judge)


def check_reward_functions(config: Config) -> None:
    """UserError for a wrong name, option or import path, and for a judge that cannot be made: a
    key, a package or a file lacks. Needs no service.
    """
    key = "reward.provider" if config.reward.provider != "local" else "sandbox"
    key = "sandbox.token_file" if key == "sandbox" and config.sandbox.token_file else key
    problems = []
    for name, check in (
        (
            "reward.reward_funcs",
            lambda: _functions(config, reward_functions_of(config), None, None),
        ),
        (key, lambda: code_judge(config, config.sandbox.endpoint or "http://127.0.0.1")),
    ):
        try:
            with users_input(name):
                check()
        except UserError as error:
            problems.append(error)
    all_of(problems)


def check_columns(config: Config, rows: Sequence[Row], measured: Sequence[str] | None = ()) -> None:
    """UserError for a row without a value in a column that one of the run's functions reads."""
    for name in reward_functions_of(config, measured):
        require_columns(rows, columns_read_by(name), f"the reward {name}")


def code_judge(
    config: Config, sandbox_endpoint: str, sandbox_token: str | None = None
) -> SandboxClient | ScriptProvider:
    """Who runs the programs. The token is that of services of ours; ``sandbox.token_file`` has that
    of others. Raises ``ValueError`` naming a missing key, package or option.
    """
    name, file = config.reward.provider, config.sandbox.token_file
    if name == "local":
        options = {
            "endpoint": sandbox_endpoint,
            "token": sandbox_token if file is None else read_token(file),
        }
    else:
        options = {**read_provider_keys(name), **config.reward.provider_options}
    return make_provider(name, max_concurrency=config.reward.max_requests, **options)


def _functions(
    config: Config,
    names: Iterable[str],
    judge: Judge | None,
    cache: VerdictCache | None,
) -> dict[str, RewardFunction]:
    """The functions but ``critic``. Without a judge they cannot run programs, but every mistake in
    their names and options shows.
    """
    reward = config.reward
    shared: dict[str, Any] = {
        "provider": judge,
        "cache": cache,
        "run_timeout": reward.run_timeout,
        "max_requests": reward.max_requests,
    }
    own: dict[str, dict[str, Any]] = {}
    if reward.overlong_buffer.enable:
        own["overlong"] = {
            "max_length": config.data.max_response_length,
            "cache_length": reward.overlong_buffer.len,
        }
    if reward.transition.is_on:
        own["transition"] = asdict(reward.transition)
    functions: dict[str, RewardFunction] = {}
    for name in names:
        if name != "critic":
            known = reward_parameters(name)
            given = {key: value for key, value in shared.items() if key in known}
            options = {**given, **own.get(name, {}), **reward.reward_options.get(name, {})}
            functions[name] = make_reward(name, **options)
    return functions
