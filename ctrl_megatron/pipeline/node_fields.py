"""The fields of the batch that the nodes of a step need and write. A graph without a field that
one of its nodes needs is refused before the run starts.

A function that declares nothing may write any field, except those of ``OF_MODELS``, which it may
write only in a node of the model's role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from ctrl_megatron.config import Config
from ctrl_megatron.errors import UserError, all_of
from ctrl_megatron.pipeline.graph import Node, TaskGraph
from ctrl_megatron.pipeline.siirl_names import NodeRole, NodeType

F = TypeVar("F", bound=Callable[..., object])
Needs = Callable[[Config], Mapping[str, str]]
"""Takes the configuration; returns the fields that a function needs, each with the setting that
makes it necessary, or "" where it is always necessary."""
OF_REWARD_MODEL = "reward/reward_model"
"""The field of a model's reward."""
OF_MODELS = {
    "old_log_probs": NodeRole.ACTOR,
    "ref_log_prob": NodeRole.REFERENCE,
    "values": NodeRole.CRITIC,
    OF_REWARD_MODEL: NodeRole.REWARD_MODEL,
}
"""Fields that only a model can compute, and the role of the node that runs the model."""
DRAWN = ("input_ids", "response_mask", "rollout_log_probs", "mini_batch", "uid")
"""Fields that every batch of samples has (``batch.make_batch``)."""
OF_TOKENS = (
    *("response_mask", "loss_mask", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values"),
    *("token_level_scores", "token_level_rewards", "advantages", "returns"),
)
"""Fields with one number per token of the responses, (B, R)."""


def writes(*fields: str) -> Callable[[F], F]:
    """Decorator of a node's function that declares every field that it may write."""

    def mark(function: F) -> F:
        function.writes = fields  # type: ignore[attr-defined]
        return function

    return mark


def needs(fields: Needs) -> Callable[[F], F]:
    """Decorator of a node's function that declares the fields that it needs."""

    def mark(function: F) -> F:
        function.needs = fields  # type: ignore[attr-defined]
        return function

    return mark


def asks_values(function: F) -> F:
    """Decorator of a node's function that uses the run's value model."""
    function.asks_values = True  # type: ignore[attr-defined]
    return function


def check_fields(config: Config, graph: TaskGraph) -> None:
    """Raise UserError with a line for every field that a node needs and no node before it writes,
    for every model that the configuration enables and no node uses, and for every policy that only
    one of them knows.
    """
    order = [graph.nodes[node_id] for node_id in graph.get_topological_sort()]
    problems = _unknown_policies(config, graph)
    all_of(problems)
    for policy, own in enumerate(config.agents):
        nodes = [node for node in order if node.agent_group == policy]
        problems += [*_missing_fields(own, graph, nodes), *_unused_models(own, graph, nodes)]
    all_of(problems)


def _missing_fields(config: Config, graph: TaskGraph, order: Sequence[Node]) -> Iterator[UserError]:
    """For the nodes of one policy, dependencies first."""
    for place, node in enumerate(order):
        needed: Mapping[str, str] = getattr(node.executable, "needs", lambda config: {})(config)
        ancestors = graph.get_ancestors(node.node_id)
        # The output of a coroutine function is there once a node that depends on it has waited.
        before = [n for n in order[:place] if not n.runs_aside or n.node_id in ancestors]
        for field, setting in needed.items():
            if not any(_may_write(writer, field) for writer in before):
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
                    f"{node.agent_group}, and the run trains {known} of at most 2 policies",
                    remedy="set agent1.model.path to the second one's directory"
                    if known == node.agent_group == 1
                    else "give it a smaller one",
                )
            )
    if known > 1 and all(node.agent_group != 1 for node in graph.nodes.values()):
        problems.append(
            UserError(
                f"no node of the pipeline {graph.graph_id} has agent_group 1",
                key="agent1.model.path",
                remedy="leave the key out, or give the second policy's nodes that number",
            )
        )
    return problems


def last_writer(nodes: Sequence[Node], field: str) -> Node | None:
    """The last of ``nodes`` that may write the field; None if none may."""
    masks = ("response_mask", "loss_mask")
    return next(
        (
            node
            for node in reversed(nodes)
            if _may_write(node, field) or (node.filter_plugin is not None and field in masks)
        ),
        None,
    )


def _may_write(node: Node, field: str) -> bool:
    declared = getattr(node.executable, "writes", None)
    if declared is not None:
        return field in declared
    role = OF_MODELS.get(field)
    return role is None or node.node_role is role


def _remedy(field: str) -> str:
    role = OF_MODELS.get(field)
    if role is None:
        return "add one before it, or let it depend on the host node that writes it"
    return (
        f"add one of role {role.value} before it (add_update_nodes and the functions of "
        "ctrl_megatron.pipeline.ctrl have it), or change the setting"
    )


def _unused_models(config: Config, graph: TaskGraph, nodes: Sequence[Node]) -> list[UserError]:
    problems = []
    if config.needs_reference and not any(_may_write(node, "ref_log_prob") for node in nodes):
        on = config.actor_rollout_ref.actor.use_kl_loss
        key = "actor_rollout_ref.actor.use_kl_loss" if on else "algorithm.use_kl_in_reward"
        problems.append(
            UserError(
                f"{key}=true: no node of the pipeline {graph.graph_id} uses the reference",
                remedy=_remedy("ref_log_prob"),
            )
        )
    if config.needs_reward_model and not any(_may_write(node, OF_REWARD_MODEL) for node in nodes):
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
    if config.needs_values and not trains:
        problems.append(
            UserError(
                f"{setting}: no node of the pipeline {graph.graph_id} trains the value model",
                remedy="add one of role CRITIC and type MODEL_TRAIN (update_critic of "
                "ctrl_megatron.pipeline.ctrl), or change the setting",
            )
        )
    critics = [node.node_id for node in nodes if getattr(node.executable, "asks_values", False)]
    if critics and not config.needs_values:
        problems.append(
            UserError(
                f"{setting}: the node {critics[0]!r} of the pipeline {graph.graph_id} uses a "
                "value model, and the run has none",
                remedy="set critic.enable=true, or leave the node out",
            )
        )
    return problems
