"""Section 5 of siiRL's guide: nodes of a worker, in the signatures of section 5.5.

    ctrl-train-rl --nproc-per-node 2 --config FILE \
        dag.custom_pipeline_fn=examples.guide.worker:build

The guide's worker builds its models in two phases and runs its own loop (sections 5.1 to 5.4). Here
``ctrl_megatron/run/build.py`` and ``loop.py`` do that for every pipeline; the state that nodes
use has other names: ``self.step`` for ``global_steps``, ``self.train`` for the data loader,
``self.groups`` for ``process_groups``.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict

from ctrl_megatron.pipeline import (
    DAGWorker,
    NodeOutput,
    NodeRole,
    NodeType,
    Pipeline,
    TaskGraph,
    node,
)


class MyWorker(DAGWorker):
    """Methods that are nodes: ``self`` is the run's worker."""

    def announce(self, config: Any, batch: TensorDict, **kwargs: Any) -> NodeOutput:
        """Section 5.4: the step and its rows."""
        assert self.step < self.total_steps and len(batch["row"]) > 0
        return NodeOutput(metrics={"guide/step": float(self.step)})

    @node(uses=("rewards",))
    def compute_reward_and_length(
        self, config: Any, batch: TensorDict, **kwargs: Any
    ) -> NodeOutput:
        """Section 5.5: the run's rewards, and a metric beside them."""
        output = self.compute_reward(batch)
        lengths = batch["response_mask"].sum(dim=1).float()
        share = lengths / config.data.max_response_length
        metrics = {**output.metrics, **self.global_means({"guide/length_share": share})}
        return NodeOutput(fields=output.fields, metrics=metrics)

    def generate(self, config: Any, batch: TensorDict, **kwargs: Any) -> NodeOutput:
        """Section 5.5; there is no other way of drawing to choose from."""
        agent_group = kwargs.pop("agent_group")
        gen_output = agent_group[NodeRole.ROLLOUT].generate_sequences(batch)
        return NodeOutput(batch=gen_output, metrics=gen_output["metrics"])

    def compute_old_log_prob(self, config: Any, batch: TensorDict, **kwargs: Any) -> NodeOutput:
        """Compute log probabilities before policy update"""
        agent_group = kwargs.pop("agent_group")
        processed_data = agent_group[NodeRole.ACTOR].compute_log_prob(batch)
        return NodeOutput(batch=processed_data, metrics=processed_data.get("metrics", {}))

    def compute_ref_log_prob(self, config: Any, batch: TensorDict, **kwargs: Any) -> NodeOutput:
        """Compute reference model log probabilities"""
        agent_group = kwargs.pop("agent_group")
        processed_data = agent_group[NodeRole.REFERENCE].compute_ref_log_prob(batch)
        return NodeOutput(batch=processed_data, metrics=processed_data["metrics"])

    def train_actor(self, config: Any, batch: TensorDict, **kwargs: Any) -> NodeOutput:
        """Execute Actor model training step"""
        agent_group = kwargs.pop("agent_group")
        processed_data = agent_group[NodeRole.ACTOR].update_actor(batch)
        return NodeOutput(batch=processed_data, metrics=processed_data["metrics"])


def build() -> TaskGraph:
    """GRPO with the methods above."""
    own, guide = f"{__name__}:MyWorker.", "ctrl_megatron.pipeline:DAGWorker."
    return (
        Pipeline("guide_worker")
        .add_node("announce", func=own + "announce")
        .add_node(
            "rollout_actor",
            func=own + "generate",
            deps=["announce"],
            node_type=NodeType.MODEL_INFERENCE,
            node_role=NodeRole.ROLLOUT,
        )
        .add_node(
            "function_reward",
            func=own + "compute_reward_and_length",
            deps=["rollout_actor"],
            node_role=NodeRole.REWARD,
        )
        .add_node(
            "calculate_advantages",
            func=guide + "compute_advantage",
            deps=["function_reward"],
            node_role=NodeRole.ADVANTAGE,
        )
        .add_node(
            "actor_old_log_prob",
            func=own + "compute_old_log_prob",
            deps=["calculate_advantages"],
            node_type=NodeType.MODEL_TRAIN,
            node_role=NodeRole.ACTOR,
            only_forward_compute=True,
        )
        .add_node(
            "reference_log_prob",
            func=own + "compute_ref_log_prob",
            deps=["actor_old_log_prob"],
            node_type=NodeType.MODEL_TRAIN,
            node_role=NodeRole.REFERENCE,
            only_forward_compute=True,
        )
        .add_node(
            "actor_train",
            func=own + "train_actor",
            deps=["reference_log_prob"],
            node_type=NodeType.MODEL_TRAIN,
            node_role=NodeRole.ACTOR,
        )
        .build()
    )
