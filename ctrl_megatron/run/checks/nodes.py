"""Checks of a pipeline's nodes: fields, keys, parameters, worlds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ctrl_megatron.config import KEYS, Config
from ctrl_megatron.config.keys import value_at_key
from ctrl_megatron.errors import UserError, raise_all
from ctrl_megatron.graph.declarations import KEYS_OF_NODES, OF_MODELS, OF_REWARD_MODEL, VALIDATION
from ctrl_megatron.graph.graph import TaskGraph
from ctrl_megatron.graph.node import Node
from ctrl_megatron.graph.siirl_names import NodeRole, NodeType
from ctrl_megatron.parallel.layout import World
from ctrl_megatron.rewards.plan import RewardPlan
from ctrl_megatron.run.worlds import HOME, world_of_roles
from ctrl_megatron.steps.dynamic_sampling import group_filter_weights


def check_worlds(graph: TaskGraph, worlds: Sequence[World]) -> None:
    """UserError for a node in a world of its own whose rows cannot be sent there and back."""
    world_of = world_of_roles(worlds)
    problems = []
    for node in graph.nodes.values():
        says = node.declared
        whole = says is not None and says.needs is not None and says.writes is not None
        if world_of(node) == HOME or (whole and not node.is_async):
            continue
        problems.append(
            UserError(
                f"the node {node.node_id!r} of the pipeline {graph.graph_id} runs on ranks of its "
                "own and does not declare what travels",
                key=f"placement.{world_of(node)}",
                remedy="write it as an ordinary function with @node(needs=..., writes=...) of "
                "ctrl_megatron.pipeline, or leave the key out",
            )
        )
    raise_all(problems)


def check_fields(config: Config, graph: TaskGraph) -> None:
    """Raise UserError with a line for every field that a node needs and no node before it writes,
    for every model that the configuration enables and no node uses, and for every policy that only
    one of them knows.
    """
    order = [graph.nodes[node_id] for node_id in graph.get_topological_sort()]
    problems = _unknown_policies(config, graph)
    raise_all(problems)
    for policy, own in enumerate(config.agents):
        nodes = [node for node in order if node.agent_group == policy]
        problems += [*_missing_fields(own, graph, nodes), *_unused_models(own, graph, nodes)]
    raise_all(problems)


def _missing_fields(config: Config, graph: TaskGraph, order: Sequence[Node]) -> Iterator[UserError]:
    """For the nodes of one policy, dependencies first."""
    for place, node in enumerate(order):
        ancestors = graph.get_ancestors(node.node_id)
        # The output of a coroutine function is there once a node that depends on it has waited.
        before = [n for n in order[:place] if not n.is_async or n.node_id in ancestors]
        for field, setting in node.needed_fields(config).items():
            if not any(writer.may_write(field) for writer in before):
                why = f"{setting}: " if setting else ""
                yield UserError(
                    f"{why}the node {node.node_id!r} of the pipeline {graph.graph_id} needs "
                    f"the field {field}, which no node before it writes",
                    remedy=_remedy(field),
                )


def _unknown_policies(config: Config, graph: TaskGraph) -> list[UserError]:
    """Problems of nodes whose policy the run lacks, and of a policy without nodes."""
    known, problems = len(config.agents), list[UserError]()
    for node in graph.nodes.values():
        if node.agent_group >= known:
            problems.append(
                UserError(
                    f"the node {node.node_id!r} of the pipeline {graph.graph_id} has agent_group="
                    f"{node.agent_group}, and the run trains {known} "
                    f"{'policy' if known == 1 else 'policies'}",
                    remedy=f"name a directory in policies.agent{node.agent_group}."
                    "actor_rollout_ref.model.path, or give the node a smaller number",
                )
            )
    used = {node.agent_group for node in graph.nodes.values()}
    problems += [
        UserError(
            f"no node of the pipeline {graph.graph_id} has agent_group {policy}",
            key=f"policies.agent{policy}",
            remedy="leave the key out, or give the policy's nodes that number",
        )
        for policy in range(1, known)
        if policy not in used
    ]
    return problems


def _remedy(field: str) -> str:
    role = OF_MODELS.get(field)
    if role is None:
        return "add one before it, or let it depend on the host node that writes it"
    return (
        f"add one of role {role.value} before it (add_update_nodes and the functions of "
        "ctrl_megatron.steps.ctrl have it), or change the setting"
    )


def _unused_models(config: Config, graph: TaskGraph, nodes: Sequence[Node]) -> list[UserError]:
    problems = []
    if config.has_kl_to_reference and not any(node.may_write("ref_log_prob") for node in nodes):
        on = config.actor_rollout_ref.actor.use_kl_loss
        key = "actor_rollout_ref.actor.use_kl_loss" if on else "algorithm.use_kl_in_reward"
        problems.append(
            UserError(
                f"{key}=true: no node of the pipeline {graph.graph_id} uses the reference",
                remedy=_remedy("ref_log_prob"),
            )
        )
    taught = config.algorithm.distillation
    if taught.is_on and not any("distilled" in node.written_fields for node in nodes):
        problems.append(
            UserError(
                f"algorithm.distillation.teacher={taught.teacher}: no node of the pipeline "
                f"{graph.graph_id} reads as a teacher",
                remedy="end the pipeline with add_update_nodes, or add read_as_teacher of "
                "ctrl_megatron.steps.teaching before update_actor",
            )
        )
    if config.needs_reward_model and not any(node.may_write(OF_REWARD_MODEL) for node in nodes):
        problems.append(
            UserError(
                f"reward_model.enable=true: no node of the pipeline {graph.graph_id} uses the "
                "reward model",
                remedy=_remedy(OF_REWARD_MODEL),
            )
        )
    trains = [
        node
        for node in nodes
        if node.node_role is NodeRole.CRITIC
        and node.node_type is NodeType.MODEL_TRAIN
        and not node.only_forward_compute
    ]
    setting = (
        f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
        if config.critic.enable is None
        else f"critic.enable={str(config.critic.enable).lower()}"
    )
    if config.needs_value_model and not trains:
        problems.append(
            UserError(
                f"{setting}: no node of the pipeline {graph.graph_id} trains the value model",
                remedy="add one of role CRITIC and type MODEL_TRAIN (update_critic of "
                "ctrl_megatron.steps.ctrl), or change the setting",
            )
        )
    critics = [node.node_id for node in nodes if "value" in node.services]
    if critics and not config.needs_value_model:
        problems.append(
            UserError(
                f"{setting}: the node {critics[0]!r} of the pipeline {graph.graph_id} uses a "
                "value model, and the run has none",
                remedy="set critic.enable=true, or leave the node out",
            )
        )
    return problems


def check_unread_keys(config: Config, graph: TaskGraph) -> None:
    """Raise UserError for every key that is set and that only nodes outside of ``graph`` read.

    Keys of the configuration file are not refused where the pipeline is chosen by an override: the
    file may have been written for another pipeline. Defaults are not refused: the configuration
    that a run writes has them.
    """
    read = (*graph.config_keys, *(VALIDATION if graph.report.validate else ()))
    if config.proxy_shares_engines:  # the engines make room for a revision
        read = (*read, "actor_rollout_ref.rollout.revision_max_tokens")
    written, pipeline = config.written, config.written.get("dag.custom_pipeline_fn")
    by_override = pipeline is not None and pipeline.is_override
    problems = [
        f"{place}: {name} is not read by any node of the pipeline {graph.graph_id}; leave it out, "
        "or name it in @node(reads=...) on the function that reads it"
        for name, place in written.items()
        if _is_below(name, KEYS_OF_NODES)
        and not _is_below(name, read)
        and (place.is_override or not by_override)
        and value_at_key(config, name) != KEYS[name].default
    ]
    if problems:
        raise UserError("\n".join(problems))


def _is_below(name: str, keys: tuple[str, ...]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in keys)


def check_node_parameters(graph: TaskGraph) -> None:
    """UserError for a node whose function has parameters other than those that ``call``
    offers.
    """
    for node in graph.nodes.values():
        try:
            node.check_parameters()
        except TypeError as error:
            raise UserError(
                f"the function of the node {node.node_id!r} cannot be called with worker and "
                f"batch: {error}",
                remedy="write it as (worker, batch), (batch, config) or, a method of a class, as "
                "(self, config, batch)",
            ) from None


def check_group_filter(config: Config, plan: RewardPlan) -> None:
    """Raise UserError where ``algorithm.filter_groups`` would compare no reward in some steps, so
    that no group could contain different ones."""
    if not config.algorithm.filter_groups.enable:
        return
    for step, weights in plan.weights_by_stage.items():
        if group_filter_weights(weights):
            continue
        raise UserError(
            "algorithm.filter_groups.enable=true looks for groups with different rewards, and of "
            f"{', '.join(weights) or 'no reward'} none counts for that from step {step} on: those "
            "of weight 0 and the punishment of long responses do not",
            key="reward.reward_funcs",
            remedy="name another function, or turn filter_groups off",
        )
