"""The masks of a step's coupled scores (``algorithms.coupled``): as seeds in the batch, and drawn
for a pass over it.

Every pass over a step's samples has masks of its own, the same for the old, the reference's and the
new scores. Fields of pass 0 have their usual names, those of pass N end in ``@N``.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict

from ctrl_megatron.algorithms.coupled import CoupledMaskOptions, draw_coupled_masks
from ctrl_megatron.config import Config
from ctrl_megatron.graph.columns import texts
from ctrl_megatron.graph.declarations import always, node
from ctrl_megatron.graph.node import NodeOutput
from ctrl_megatron.steps.losses import row_names
from ctrl_megatron.steps.worker import DAGWorker

MASK_SEED = "mask_seed"
"""(B,) int64: the seed of each row's masks."""
_OF_PASSES = (MASK_SEED, "old_log_probs", "ref_log_prob")
_ACTOR = "actor_rollout_ref.actor."


def coupled_mask_options(config: Config) -> CoupledMaskOptions:
    actor = config.actor_rollout_ref.actor
    return CoupledMaskOptions(
        random_masking=actor.random_masking, p_mask_prompt=actor.p_mask_prompt
    )


@node(
    reads=(_ACTOR + "random_masking", _ACTOR + "p_mask_prompt", _ACTOR + "ppo_epochs"),
    needs=always("uid", "problem_id"),
    writes=(MASK_SEED,),
)
def seed_masks(worker: DAGWorker, batch: TensorDict) -> NodeOutput:
    """Columns ``mask_seed``, ``mask_seed@1``, ...: one (B,) int64 per PPO epoch, a function of the
    run's seed, the step, the row and the sample's number in its group, so that neither ranks nor
    the order of rows change the masks."""
    config, rule = worker.config, coupled_mask_options(worker.config)
    names = row_names(texts(batch["uid"]), texts(batch["problem_id"]))
    fields = {}
    for number in range(config.actor_rollout_ref.actor.ppo_epochs):
        seeds = [rule.row_seed(config.trainer.seed, worker.step, name, number) for name in names]
        fields[field_name_of_pass(MASK_SEED, number)] = torch.tensor(seeds, dtype=torch.int64)
    return NodeOutput(fields=fields)


def field_name_of_pass(field: str, number: int) -> str:
    """The name of the field that has ``field`` for pass ``number`` of the update; the first pass
    has the plain name."""
    return f"{field}@{number}" if number else field


def scored_passes(batch: TensorDict, config: Config) -> range:
    """The passes that have scores of their own: all of the update's, or where the batch has no
    masks the first, whose log-probs are those of every pass."""
    return range(config.actor_rollout_ref.actor.ppo_epochs if MASK_SEED in batch else 1)


def batch_for_pass(batch: TensorDict, number: int, config: Config) -> TensorDict:
    """The batch with the fields of pass ``number`` under their usual names, and with the masks of
    ``algorithms.coupled.CoupledMasks`` as ``masked`` and ``mask_share``. A batch without masks is
    returned as it is.
    """
    if MASK_SEED not in batch:
        return batch
    seen = batch.exclude(*(name for name, _ in batch.items() if "@" in str(name)))
    for field in _OF_PASSES:
        if (own := field_name_of_pass(field, number)) in batch:
            seen[field] = batch[own]
    width, seeds = batch["response_mask"].shape[1], seen[MASK_SEED].tolist()
    masks = draw_coupled_masks(batch["attention_mask"], width, seeds, coupled_mask_options(config))
    seen["masked"], seen["mask_share"] = masks.masked, masks.share
    return seen
