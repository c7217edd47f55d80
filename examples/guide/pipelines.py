"""The pipelines of siiRL's guide, section 4.2, as printed but for the paths.

    ctrl-train-rl --nproc-per-node 2 --config FILE \
        dag.custom_pipeline_fn=examples.guide.pipelines:grpo_pipeline

``ctrl_megatron.pipeline`` has pipelines of these names whose nodes run beside each other where they
can; these run one after the other, as the guide has them.
"""

from __future__ import annotations

from ctrl_megatron.pipeline import NodeRole, NodeType, Pipeline, TaskGraph


def grpo_pipeline() -> TaskGraph:
    """Section 4.2.1: draw, reward, compare within the group, update."""
    pipeline = Pipeline("grpo_training_pipeline", "Standard GRPO workflow")

    pipeline.add_node(
        "rollout_actor",
        func="ctrl_megatron.pipeline:DAGWorker.generate",
        deps=[],
        node_type=NodeType.MODEL_INFERENCE,
        node_role=NodeRole.ROLLOUT,
    ).add_node(
        "function_reward",
        func="ctrl_megatron.pipeline:DAGWorker.compute_reward",
        deps=["rollout_actor"],
        node_type=NodeType.COMPUTE,
        node_role=NodeRole.REWARD,
    ).add_node(
        "calculate_advantages",
        func="ctrl_megatron.pipeline:DAGWorker.compute_advantage",
        deps=["function_reward"],
        node_type=NodeType.COMPUTE,
        node_role=NodeRole.ADVANTAGE,
    ).add_node(
        "actor_old_log_prob",
        func="ctrl_megatron.pipeline:DAGWorker.compute_old_log_prob",
        deps=["calculate_advantages"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.ACTOR,
        only_forward_compute=True,
    ).add_node(
        "reference_log_prob",
        func="ctrl_megatron.pipeline:DAGWorker.compute_ref_log_prob",
        deps=["actor_old_log_prob"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.REFERENCE,
    ).add_node(
        "actor_train",
        func="ctrl_megatron.pipeline:DAGWorker.train_actor",
        deps=["reference_log_prob"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.ACTOR,
    )

    return pipeline.build()


def ppo_pipeline() -> TaskGraph:
    """Section 4.2.2: advantages by a value model, which is trained too."""
    pipeline = Pipeline("ppo_training_pipeline", "Standard PPO workflow")

    pipeline.add_node(
        "rollout_actor",
        func="ctrl_megatron.pipeline:DAGWorker.generate",
        deps=[],
        node_type=NodeType.MODEL_INFERENCE,
        node_role=NodeRole.ROLLOUT,
    ).add_node(
        "function_reward",
        func="ctrl_megatron.pipeline:DAGWorker.compute_reward",
        deps=["rollout_actor"],
        node_type=NodeType.COMPUTE,
        node_role=NodeRole.REWARD,
    ).add_node(
        "compute_value",
        func="ctrl_megatron.pipeline:DAGWorker.compute_value",
        deps=["function_reward"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.CRITIC,
        only_forward_compute=True,
    ).add_node(
        "calculate_advantages",
        func="ctrl_megatron.pipeline:DAGWorker.compute_advantage",
        deps=["compute_value"],
        node_type=NodeType.COMPUTE,
        node_role=NodeRole.ADVANTAGE,
    ).add_node(
        "actor_old_log_prob",
        func="ctrl_megatron.pipeline:DAGWorker.compute_old_log_prob",
        deps=["calculate_advantages"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.ACTOR,
        only_forward_compute=True,
    ).add_node(
        "reference_log_prob",
        func="ctrl_megatron.pipeline:DAGWorker.compute_ref_log_prob",
        deps=["actor_old_log_prob"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.REFERENCE,
    ).add_node(
        "actor_train",
        func="ctrl_megatron.pipeline:DAGWorker.train_actor",
        deps=["reference_log_prob"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.ACTOR,
    ).add_node(
        "critic_train",
        func="ctrl_megatron.pipeline:DAGWorker.train_critic",
        deps=["actor_train"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.CRITIC,
    )

    return pipeline.build()


def dapo_pipeline() -> TaskGraph:
    """Section 4.2.3: only groups with different rewards.

    ``dynamic_sampling`` draws again until there are enough groups, so it does the work of the two
    nodes before it too.
    """
    pipeline = Pipeline("dapo_training_pipeline", "DAPO workflow")

    pipeline.add_node(
        "rollout_actor",
        func="ctrl_megatron.pipeline:DAGWorker.generate",
        deps=[],
        node_type=NodeType.MODEL_INFERENCE,
        node_role=NodeRole.ROLLOUT,
    ).add_node(
        "function_reward",
        func="ctrl_megatron.pipeline:DAGWorker.compute_reward",
        deps=["rollout_actor"],
        node_type=NodeType.COMPUTE,
        node_role=NodeRole.REWARD,
    ).add_node(
        "dynamic_sampling",
        func="ctrl_megatron.pipeline:DAGWorker.dynamic_sampling",
        deps=["function_reward"],
        node_type=NodeType.COMPUTE,
        node_role=NodeRole.DYNAMIC_SAMPLING,
    ).add_node(
        "calculate_advantages",
        func="ctrl_megatron.pipeline:DAGWorker.compute_advantage",
        deps=["dynamic_sampling"],
        node_type=NodeType.COMPUTE,
        node_role=NodeRole.ADVANTAGE,
    ).add_node(
        "actor_old_log_prob",
        func="ctrl_megatron.pipeline:DAGWorker.compute_old_log_prob",
        deps=["calculate_advantages"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.ACTOR,
        only_forward_compute=True,
    ).add_node(
        "reference_log_prob",
        func="ctrl_megatron.pipeline:DAGWorker.compute_ref_log_prob",
        deps=["actor_old_log_prob"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.REFERENCE,
    ).add_node(
        "actor_train",
        func="ctrl_megatron.pipeline:DAGWorker.train_actor",
        deps=["reference_log_prob"],
        node_type=NodeType.MODEL_TRAIN,
        node_role=NodeRole.ACTOR,
    )

    return pipeline.build()
