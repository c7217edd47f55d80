"""Section 4.2.4 of siiRL's guide: the pipeline of an agent that acts in a world, node by node.

    python examples/embodied.py runs/embodied
    ctrl-train-rl --config runs/embodied/config.yaml dag.options=null \
        actor_rollout_ref.rollout.revision_max_tokens=16 \
        dag.custom_pipeline_fn=examples.guide.embodied:embodied_srpo_pipeline

``ctrl_megatron.pipeline:embodied_srpo_pipeline`` has these nodes for any world. An action is a text
here: the guide's models of pictures and actions, and V-JEPA, which embeds pictures, are not part of
this package (docs/own_pipeline.md).
"""

from __future__ import annotations

from ctrl_megatron.pipeline import (
    Episodes,
    NodeRole,
    NodeType,
    Pipeline,
    TaskGraph,
    node,
    progress_reward,
    success_rate,
    success_rate_within,
)
from examples.embodied import GridWorld, embed

WORKER = "ctrl_megatron.pipeline:DAGWorker."


def embodied_srpo_pipeline() -> TaskGraph:
    """Act, keep groups by their share of successes, reward progress, update."""
    world = Episodes(
        make=node()(GridWorld), turns=8, turn_tokens=1, fields=("success", "trajectory")
    )
    pipeline = Pipeline(
        "embodied_grpo_training_pipeline",
        "Embodied AI GRPO training workflow with data filtering and reward of progress.",
    )
    pipeline.add_node(
        "rollout_actor",
        func=world.node(),
        deps=[],
        node_type=NodeType.MODEL_INFERENCE,
        node_role=NodeRole.ROLLOUT,
    ).add_node(
        "dynaminc_sampling",
        func=success_rate,
        deps=["rollout_actor"],
        node_type=NodeType.COMPUTE,
        filter_plugin=success_rate_within(0.0, 1.0),
    ).add_node(
        "compute_reward",
        func=progress_reward(embed),
        deps=["dynaminc_sampling"],
        node_type=NodeType.COMPUTE,
        node_role=NodeRole.REWARD,
    ).add_node(
        "calculate_advantages",
        func=WORKER + "compute_advantage",
        deps=["compute_reward"],
        node_type=NodeType.COMPUTE,
        node_role=NodeRole.ADVANTAGE,
    ).add_node(
        "actor_old_log_prob",
        func=WORKER + "compute_old_log_prob",
        deps=["calculate_advantages"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.ACTOR,
        only_forward_compute=True,
    ).add_node(
        "reference_log_prob",
        func=WORKER + "compute_ref_log_prob",
        deps=["actor_old_log_prob"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.REFERENCE,
    ).add_node(
        "actor_train",
        func=WORKER + "train_actor",
        deps=["reference_log_prob"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.ACTOR,
    )
    return pipeline.build()
