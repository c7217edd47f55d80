"""Section 11 of siiRL's guide: a pipeline, a reward, an estimator and a loss of one's own.

    ctrl-train-rl --nproc-per-node 2 --config FILE \
        dag.custom_pipeline_fn=examples.guide.extensions:my_custom_pipeline \
        algorithm.adv_estimator=my_custom_adv \
        actor_rollout_ref.actor.policy_loss=my_custom_loss
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from ctrl_megatron.algorithms import agg_loss, register_adv_est, register_policy_loss
from ctrl_megatron.pipeline import NodeOutput, NodeRole, NodeType, Pipeline, TaskGraph


def my_custom_pipeline() -> TaskGraph:
    """Section 11.1. The update computes the log-probs before it by itself."""
    return (
        Pipeline("my_custom_pipeline", "My custom RL workflow")
        .add_node(
            "rollout_actor",
            func="ctrl_megatron.pipeline:DAGWorker.generate",
            deps=[],
            node_type=NodeType.MODEL_INFERENCE,
            node_role=NodeRole.ROLLOUT,
        )
        .add_node(
            "custom_reward",
            func=f"{__name__}:compute_custom_reward",
            deps=["rollout_actor"],
            node_type=NodeType.COMPUTE,
            node_role=NodeRole.REWARD,
        )
        .add_node(
            "calculate_advantages",
            func="ctrl_megatron.pipeline:DAGWorker.compute_advantage",
            deps=["custom_reward"],
            node_type=NodeType.COMPUTE,
            node_role=NodeRole.ADVANTAGE,
        )
        .add_node(
            "actor_train",
            func="ctrl_megatron.pipeline:DAGWorker.train_actor",
            deps=["calculate_advantages"],
            node_type=NodeType.MODEL_TRAIN,
            node_role=NodeRole.ACTOR,
        )
        .build()
    )


def compute_custom_reward(batch: TensorDict, config: Any, **kwargs: Any) -> NodeOutput:
    """Section 11.2: how short a response is, on its last token.

    The guide's lines make integers as wide as prompt and response, and write the last column; a
    reward is a float32 of the responses' shape, on the last token that counts.
    """
    mask = batch["response_mask"]
    lengths = mask.sum(dim=1)
    scores = 1 - lengths.float() / config.data.max_response_length
    token_level_rewards = torch.zeros(mask.shape, dtype=torch.float32)
    token_level_rewards[torch.arange(len(mask)), lengths.clamp(min=1) - 1] = scores
    batch["token_level_scores"] = token_level_rewards
    batch["token_level_rewards"] = token_level_rewards
    metrics = kwargs["worker"].means({"reward/mean_score": scores})
    return NodeOutput(batch=batch, metrics=metrics)


@register_adv_est("my_custom_adv")
def compute_my_custom_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 11.3: a response's reward above that of the mean response here, at each token."""
    scores = token_level_rewards.sum(dim=1, keepdim=True)
    advantages = (scores - scores.mean()) * response_mask
    return advantages, token_level_rewards.flip(1).cumsum(1).flip(1)


@register_policy_loss("my_custom_loss")
def compute_my_custom_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Section 11.4: the policy gradient without a bound of the ratio."""
    ratio = (log_prob - old_log_prob).exp()
    per_token = -advantages * ratio
    if rollout_is_weights is not None:
        per_token = per_token * rollout_is_weights
    pg_loss = agg_loss(per_token, response_mask, loss_agg_mode)
    ppo_kl = agg_loss((old_log_prob - log_prob).detach(), response_mask, "token-mean")
    none = torch.zeros(())
    return pg_loss, none, ppo_kl, none
