"""The reward functions of a plan, made, with the judge and the cache that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ctrl_megatron.config import Config
from ctrl_megatron.config.environment import read_provider_options
from ctrl_megatron.data.rows import CRITIQUE, Row, require_columns
from ctrl_megatron.errors import UserError, is_user_defined
from ctrl_megatron.rewards.cache import VerdictCache, json_fingerprint
from ctrl_megatron.rewards.grading import RequestCheck, count_judgeable_tests
from ctrl_megatron.rewards.plan import OF_CRITIQUES, PlannedReward, RewardPlan
from ctrl_megatron.rewards.providers import ScriptProvider, make_provider
from ctrl_megatron.rewards.registry import get_reward_factory, make_reward, reward_parameters
from ctrl_megatron.rewards.reward_sum import RewardSum
from ctrl_megatron.rewards.users_reward import UsersReward
from ctrl_megatron.sandbox import SandboxClient
from ctrl_megatron.sandbox.access import read_token
from ctrl_megatron.sandbox.limits import SandboxLimits
from ctrl_megatron.sandbox.task import require_judgeable
from ctrl_megatron.sandbox.wire import SubmitRequest


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

    ``rows`` are those of training and validation together, which ``make_row_check`` accepts. Raises
    ``UserError`` for different rows with one id, and for an option, key, package or cache file that
    cannot be used.
    """
    judge = code_judge(config, sandbox_endpoint, sandbox_token) if plan.runs_programs else None
    reward = config.reward
    cache = VerdictCache(reward.cache_path, normalised=reward.cache_key == "normalised")
    judged = plan.functions["critic"].filter_rows(rows) if "critic" in plan.functions else rows
    of_critic: dict[str, Any] = {"file": judged, "tokenizer": tokenizer, "check": False}
    of_critic |= {"sandbox": judge, "cache": cache}
    of_others = {"provider": judge, "cache": cache}
    functions = {}
    for name, planned in plan.text_rewards.items():
        shared = of_critic if name == "critic" else _accepted(name, of_others)
        functions[name] = made = make_reward(name, **shared, **planned.options)
        if isinstance(made, UsersReward):
            made.seconds = config.reward.function_timeout
    tasks = {name: planned.tasks for name, planned in plan.text_rewards.items() if planned.tasks}
    weights = {name: planned.weight for name, planned in plan.text_rewards.items()}
    return RewardSum(functions, weights, judge=judge, tasks=tasks, gate=plan.gate)


def make_row_check(config: Config, plan: RewardPlan) -> Callable[[Row], None]:
    """A function that raises ``UserError``, naming file and row, for a row that a function of
    ``plan`` cannot reward: a column that it reads has no value, or no program can be judged on the
    row's tests. Needs no service, whose limits count only where the run starts it.
    """
    judge = code_judge(config, config.sandbox.endpoint or "http://127.0.0.1")
    limits = SandboxLimits(problem_seconds=config.sandbox.problem_seconds)
    own = partial(require_judgeable, limits=None if config.sandbox.endpoint else limits)
    request = _once(judge.check if isinstance(judge, ScriptProvider) else own)
    by_normal_form = plan.runs_programs and config.reward.cache_key == "normalised"
    checks: list[tuple[str, PlannedReward, Callable[[Row], object]]] = []
    for name, planned in plan.text_rewards.items():
        check: Callable[[Row], object] = _nothing
        if name == "critic":
            names = ("run_timeout", "shared_process_graders")
            options = {name: planned.options[name] for name in names}
            check = partial(count_judgeable_tests, check=request, **options)
        elif ":" in name or not is_user_defined(get_reward_factory(name)):
            made = make_reward(name, **options_without_judge(name), **planned.options)
            if found := getattr(made, "check_row", None):
                check = partial(found, check=request)
        checks.append((name, planned, check))

    def check_row(row: Row) -> None:
        if by_normal_form:
            _require_calls_of_functions(row)
        for name, planned, check in checks:
            # run.checks.rewards says what is wrong with a row of another task.
            if planned.filter_rows([row]) and not (name in OF_CRITIQUES and row.task != CRITIQUE):
                require_columns([row], planned.reads, f"the reward {name}")
                check(row)

    return check_row


def _require_calls_of_functions(row: Row) -> None:
    if row.prompter_type != "mbppplus":
        raise UserError(
            f"{row.id!r} has tests of {row.prompter_type}; only calls of functions are judged by a "
            "program's normal form",
            file=row.place,
            key="reward.cache_key=normalised",
            remedy="leave the key or the row out",
        )


def _once(check: RequestCheck) -> RequestCheck:
    """``check`` of different requests only: attempts at one problem have the same tests."""
    accepted = set[str]()

    def once(request: SubmitRequest) -> None:
        key = json_fingerprint(request.model_dump_json())
        if key not in accepted:
            check(request)
            accepted.add(key)

    return once


def _nothing(row: Row) -> None:
    """The check of a function that rewards every row."""


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
        options = {**read_provider_options(name), **config.reward.provider_options}
    reward = config.reward
    shared = {"max_concurrency": reward.max_requests, "silence": reward.request_timeout}
    return make_provider(name, **{**shared, **options})


def options_without_judge(name: str) -> dict[str, Any]:
    """What the factory ``name`` is given where nothing is judged."""
    return _accepted(name, {"provider": None, "cache": None})


def _accepted(name: str, shared: dict[str, Any]) -> dict[str, Any]:
    parameters = reward_parameters(name)
    return {key: value for key, value in shared.items() if key in parameters}
