"""Everything about an RL run that is checked before it reads its rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext

from ctrl_megatron.algorithms import (
    ESTIMATOR_INPUTS,
    LOSS_INPUTS,
    POLICY_LOSS_REGISTRY,
    get_adv_estimator,
    reads_reward_parts,
)
from ctrl_megatron.config import BUILT_IN_PIPELINES, Config
from ctrl_megatron.config.checks import estimator_is_loss_hint
from ctrl_megatron.config.import_path import import_callable
from ctrl_megatron.config.keys import value_at_key
from ctrl_megatron.config.options import explicit_parameters, function_options
from ctrl_megatron.errors import (
    UserError,
    begin_lines_of_errors,
    convert_user_code_errors,
    raise_all,
    run_all_checks,
)
from ctrl_megatron.graph.graph import TaskGraph
from ctrl_megatron.graph.siirl_names import NodeRole
from ctrl_megatron.parallel.layout import worlds_of
from ctrl_megatron.resharding.transports import sender_class
from ctrl_megatron.rewards.plan import RewardPlan, plan_rewards
from ctrl_megatron.rollout.engine import require_engine
from ctrl_megatron.run.checks.machine import (
    check_checkpoint,
    check_disk,
    check_gpu,
    check_loggers,
    check_profile,
    check_temporary_directory,
    check_writable_run_directory,
)
from ctrl_megatron.run.checks.models import (
    check_model_files,
    check_proxy,
    check_reward_model,
    check_tokenizers,
)
from ctrl_megatron.run.checks.nodes import (
    check_fields,
    check_group_filter,
    check_node_parameters,
    check_unread_keys,
    check_worlds,
)
from ctrl_megatron.run.checks.rewards import check_rewards
from ctrl_megatron.run.planning import checkpoint_model_folders, checkpoint_state_parts
from ctrl_megatron.steps.ctrl import ctrl_pipeline

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_rl_run(config: Config) -> tuple[TaskGraph, RewardPlan]:
    """The pipeline and the rewards of an RL run, once all but its rows has been checked.

    Raises UserError, with a line per problem.
    """
    graphs: list[TaskGraph] = []
    plans: list[RewardPlan] = []
    run_all_checks(
        lambda: graphs.append(configured_pipeline(config)),
        lambda: check_estimator_and_loss(config),
        lambda: check_rewards(config),
        lambda: plans.extend(plan_rewards(config, graph.required_rewards) for graph in graphs),
        lambda: [check_group_filter(config, plan) for plan in plans],
        *map(_model_checks, config.agents),
        lambda: check_proxy(config),
        lambda: check_reward_model(config),
        lambda: check_loggers(config),
        lambda: check_profile(config),
        lambda: check_writable_run_directory(config),
        lambda: check_temporary_directory(config),
        lambda: check_checkpoint(
            config,
            checkpoint_model_folders(config),
            ("sampler", *checkpoint_state_parts(config)),
        ),
    )
    check_gpu(config, "rl")
    check_disk(config, "rl")
    return graphs[0], plans[0]


def _model_checks(config: Config) -> Callable[[], None]:
    """A check of the models and engines of the policy whose configuration is ``config``."""
    keys, number = config.actor_rollout_ref.rollout, config.number

    def check() -> None:
        with begin_lines_of_errors(f"policies.agent{number}." if number else ""):
            run_all_checks(
                lambda: check_model_files(config, "rl"),
                lambda: require_engine(keys.name, keys.python),
                lambda: sender_class(keys.weight_transport),
                lambda: check_tokenizers(config, "rl"),
            )

    return check


def configured_pipeline(config: Config) -> TaskGraph:
    """The graph that the function ``dag.custom_pipeline_fn`` builds, or CTRL's.

    The function's first parameter, if it has one, is the configuration; the others are the options
    of the pipeline (``dag.options``).
    """
    reference, key = config.dag.custom_pipeline_fn, "dag.custom_pipeline_fn"
    with convert_user_code_errors(f"{key}={reference}") if reference else nullcontext():
        function = import_callable(reference, key) if reference else ctrl_pipeline
        parameters = explicit_parameters(function).items()
        first = [name for name, p in parameters if p.kind in _POSITIONAL][:1]
        options = function_options(
            function,
            config.dag.options,
            "dag.options",
            inputs=first,
            place=config.written.get("dag.options"),
        )
        graph = function(*(config for _ in first), **options)
    if not isinstance(graph, TaskGraph):
        raise UserError(
            f"{key}={reference} returned {type(graph).__name__}, not the TaskGraph that "
            "Pipeline.build() returns"
        )
    check_node_parameters(graph)
    check_fields(config, graph)
    check_worlds(graph, worlds_of(config.trainer.nnodes * config.trainer.n_gpus_per_node, config))
    if config.algorithm.filter_groups.enable and not graph.draws_own_rows:
        raise UserError(
            f"algorithm.filter_groups.enable=true has no effect on the pipeline {graph.graph_id}: "
            f"none of its nodes has the role {NodeRole.DYNAMIC_SAMPLING.value}; turn it off, or "
            "add such a node (ctrl_pipeline(config) and grpo_pipeline(config) have one)"
        )
    if reference not in BUILT_IN_PIPELINES:
        check_unread_keys(config, graph)
    return graph


def check_estimator_and_loss(config: Config) -> None:
    """UserError for an estimator or a loss that is not registered, and for options that it does not
    have. The module of ``dag.custom_pipeline_fn`` must have been imported, which may register some.
    """
    run_all_checks(
        lambda: _check_function(
            config, "algorithm.adv_estimator", get_adv_estimator, ESTIMATOR_INPUTS
        ),
        lambda: _check_function(
            config,
            "actor_rollout_ref.actor.policy_loss",
            lambda name: POLICY_LOSS_REGISTRY.get(name).function,
            LOSS_INPUTS,
        ),
    )
    _check_estimator_of_parts(config)


def _check_estimator_of_parts(config: Config) -> None:
    """UserError for settings that do nothing beside an estimator that reads the rewards of single
    functions."""
    algorithm = config.algorithm
    if not reads_reward_parts(algorithm.adv_estimator):
        return
    name, problems = f"algorithm.adv_estimator={algorithm.adv_estimator}", list[UserError]()
    if config.reward.judge.gate is not None:
        problems.append(
            UserError(
                f"reward.judge.gate replaces the sum of the rewards, and {name} reads each by "
                "itself",
                remedy="leave one of them out (reward.judge.wrong can be negative)",
            )
        )
    if algorithm.use_kl_in_reward:
        problems.append(
            UserError(
                f"{name} reads the rewards of functions, not token rewards",
                key="algorithm.use_kl_in_reward",
                remedy="set actor_rollout_ref.actor.use_kl_loss=true in its place",
            )
        )
    raise_all(problems)


def _check_function(
    config: Config,
    key: str,
    look_up: Callable[[str], Callable[..., object]],
    inputs: tuple[str, ...],
) -> None:
    name, options = value_at_key(config, key), f"{key}_options"
    try:
        function = look_up(name)
    except ValueError as error:
        raise UserError(
            f"{key}={name}: {error}; "
            + (
                estimator_is_loss_hint(key, config)
                or "correct the name, or register it in the module of dag.custom_pipeline_fn"
            )
        ) from None
    function_options(
        function,
        value_at_key(config, options),
        options,
        inputs=inputs,
        place=config.written.get(options),
    )
