"""The pipelines that come with the package."""

from __future__ import annotations

from ctrl_megatron.pipeline.builder import Pipeline
from ctrl_megatron.pipeline.node import NodePlace, NodeRole, NodeType
from ctrl_megatron.pipeline.task_graph import TaskGraph

_NODES = "ctrl_megatron.pipeline.ctrl_nodes"


def ctrl_pipeline() -> TaskGraph:
    """Critique, revise, judge beside the log-probs, estimate advantages, update, sync.

    The sandbox node stands before the log-probs and nothing up to the scores depends on it, so it
    runs while they are computed.
    """
    inference, train = NodeType.MODEL_INFERENCE, NodeType.MODEL_TRAIN
    pipeline = Pipeline("ctrl_training_pipeline", "critique-revision policy optimisation")
    pipeline.add_node(
        "generate_critiques",
        f"{_NODES}:generate_critiques",
        node_type=inference,
        node_role=NodeRole.ROLLOUT,
        place=NodePlace.ROLLOUT,
    ).add_node(
        "generate_revisions",
        f"{_NODES}:generate_revisions",
        ["generate_critiques"],
        node_type=inference,
        node_role=NodeRole.ROLLOUT,
        place=NodePlace.ROLLOUT,
    ).add_node(
        "sandbox",
        f"{_NODES}:judge_revisions",
        ["generate_revisions"],
        node_type=NodeType.ENV_INTERACT,
        node_role=NodeRole.REWARD,
        place=NodePlace.HOST,
    ).add_node(
        "old_log_prob",
        f"{_NODES}:old_log_prob",
        ["generate_revisions"],
        node_type=train,
        node_role=NodeRole.ACTOR,
        only_forward_compute=True,
    ).add_node(
        "ref_log_prob",
        f"{_NODES}:ref_log_prob",
        ["old_log_prob"],
        node_type=train,
        node_role=NodeRole.REFERENCE,
        only_forward_compute=True,
    ).add_node(
        "scores",
        f"{_NODES}:place_scores",
        ["sandbox"],
        node_role=NodeRole.REWARD,
    ).add_node(
        "token_rewards",
        f"{_NODES}:token_rewards",
        ["scores", "old_log_prob", "ref_log_prob"],
        node_role=NodeRole.REWARD,
    ).add_node(
        "advantages",
        f"{_NODES}:advantages",
        ["token_rewards"],
        node_role=NodeRole.ADVANTAGE,
    ).add_node(
        "actor_update",
        "ctrl_megatron.pipeline.actor_update:update_actor",
        ["advantages"],
        node_type=train,
        node_role=NodeRole.ACTOR,
    ).add_node(
        "sync_weights",
        f"{_NODES}:sync_weights",
        ["actor_update"],
        node_type=train,
        node_role=NodeRole.ACTOR,
    )
    return pipeline.build()
