"""The value model's part in a step (PPO): values before the update, its own optimizer steps."""

from __future__ import annotations

from functools import partial

import torch
from tensordict import TensorDict

from ctrl_megatron.algorithms import (
    explained_variance,
    explained_variance_sums,
    value_loss_terms,
)
from ctrl_megatron.models.loss_scale import GlobalCounts
from ctrl_megatron.models.value import ValueModel
from ctrl_megatron.pipeline.actor_loss import aggregate, means_over_steps, mini_batches
from ctrl_megatron.pipeline.executor import NodeOutput
from ctrl_megatron.pipeline.node_keys import VALUES, reads
from ctrl_megatron.pipeline.sampling import tensors_of
from ctrl_megatron.pipeline.worker import DAGWorker


class ValueLoss:
    """A ``models.value.ValueLossFn``: this micro-batch's share of the global loss, and scalars.

    ``response_limit`` is the constant of ``seq-mean-token-sum-norm``.
    """

    def __init__(self, cliprange: float, *, loss_agg_mode: str, response_limit: int) -> None:
        self._cliprange, self._loss_agg_mode = cliprange, loss_agg_mode
        self._response_limit = response_limit

    def __call__(
        self, values: torch.Tensor, rows: dict[str, torch.Tensor], counts: GlobalCounts
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = rows["response_mask"]

        whole = partial(aggregate, mask=mask, counts=counts, response_limit=self._response_limit)
        terms = value_loss_terms(values, rows["returns"], rows["values"], mask, self._cliprange)
        loss = whole(terms.loss, self._loss_agg_mode)
        scalars = {
            "critic/vf_loss": loss,
            "critic/vf_clipfrac": whole(terms.clipped, "token-mean"),
            "critic/value_mean": whole(values, "token-mean"),
        }
        return loss, {name: value.detach() for name, value in scalars.items()}


@reads(*VALUES)
def compute_values(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``values`` (B, R): what the value model expects before each response token."""
    return NodeOutput(fields={"values": value_model(worker).values(tensors_of(batch))})


@reads(*VALUES)
def update_critic(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``critic.ppo_epochs`` passes over the mini-batches; metrics are means over the steps.

    ``critic/explained_variance`` speaks of the values before the update.
    """
    config, model = worker.config, value_model(worker)
    steps = []
    loss = ValueLoss(
        config.critic.cliprange_value,
        loss_agg_mode=config.actor_rollout_ref.actor.loss_agg_mode,
        response_limit=config.data.max_response_length,
    )
    # Rows that leave the policy's loss for the engine's sake still have returns to learn.
    learned = batch.exclude("loss_mask")
    for rows in mini_batches(learned, epochs=config.value_epochs):
        steps.append(model.step(rows, loss))
    sums = worker.groups.sum_over_data(
        explained_variance_sums(batch["values"], batch["returns"], batch["response_mask"])
    )
    metrics = means_over_steps(steps, "critic")
    explained = explained_variance(sums)
    if explained == explained:
        # Returns that do not vary leave nothing to explain.
        metrics["critic/explained_variance"] = explained
    return NodeOutput(metrics=metrics)


def value_model(worker: DAGWorker) -> ValueModel:
    """The worker's value model; RuntimeError where the run has none."""
    if worker.value is None:
        raise RuntimeError("this pipeline has nodes of a value model; set critic.enable=true")
    return worker.value
