"""Section 5 of siiRL's guide: nodes of a worker, in the signatures of section 5.5.

    ctrl-train-rl --nproc-per-node 2 --config FILE \
        dag.custom_pipeline_fn=examples.guide.worker:build

The guide's worker builds its models in two phases and runs its own loop (sections 5.1 to 5.4). Here
``ctrl_megatron/run/build.py`` and ``loop.py`` do that for every pipeline; the state that nodes
use has other names: ``self.step`` for ``global_steps``, ``self.policy``, ``self.reference`` and
``self.value``, those of the node's ``agent_group``, for ``agent_group[NodeRole...]``,
``self.train`` for the data loader, ``self.groups`` for ``process_groups``.
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


def build() -> TaskGraph:
    """GRPO without a reference, with the two methods above."""
    own, guide = f"{__name__}:MyWorker.", "ctrl_megatron.pipeline:DAGWorker."
    return (
        Pipeline("guide_worker")
        .add_node("announce", func=own + "announce")
        .add_node(
            "rollout_actor",
            func=guide + "generate",
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
            "actor_train",
            func=guide + "train_actor",
            deps=["calculate_advantages"],
            node_type=NodeType.MODEL_TRAIN,
            node_role=NodeRole.ACTOR,
        )
        .build()
    )
