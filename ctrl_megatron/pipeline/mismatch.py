"""How far the engine's probabilities are from the trainer's, and the correction of the loss."""

from __future__ import annotations

import dataclasses

import torch
from tensordict import TensorDict

from ctrl_megatron.algorithms import correct_rollout, mismatch_metrics, mismatch_sums
from ctrl_megatron.algorithms.rollout_correction import MismatchSums
from ctrl_megatron.pipeline.executor import NodeOutput
from ctrl_megatron.pipeline.worker import DAGWorker


def correct_mismatch(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """``loss_mask`` (B, R) bool and, where they are on, ``rollout_is_weights`` (B, R) float32.

    The metrics are reported whether a correction is on or not.
    """
    keys = worker.config.algorithm.rollout_correction
    given = batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"]
    correction = correct_rollout(*given, **dataclasses.asdict(keys))
    mine = mismatch_sums(*given, correction, keys.rollout_is_threshold)
    total = MismatchSums(
        sums=worker.groups.sum_over_data(mine.sums),
        largest=torch.tensor(max(worker.groups.from_data_ranks(float(mine.largest)))),
    )
    fields = {"loss_mask": correction.response_mask}
    if correction.weights is not None:
        fields["rollout_is_weights"] = correction.weights.float()
    return NodeOutput(fields=fields, metrics=mismatch_metrics(total))
