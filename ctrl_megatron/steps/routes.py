"""Routing replay: the experts that were chosen when a text was drawn, or for the old log-probs, in
the passes of the update (``actor_rollout_ref.rollout.router_replay``).

Sources: R3 (arXiv 2510.11370) takes the engine's choices, R2 (GSPO, arXiv 2507.18071) the trainer's
own of the old log-probs.
"""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

from ctrl_megatron.models.micro_batch import EXPERT_ROUTES
from ctrl_megatron.steps.batch import samples_of
from ctrl_megatron.steps.worker import DAGWorker
from ctrl_megatron.types import ExpertRoutes


def with_engine_routes(worker: DAGWorker, batch: TensorDict) -> TensorDict:
    """The batch with ``expert_routes`` where the engines' choices are replayed: those of the
    weights that the policy has now. Older ones would give new weights the routes of others, so
    their tokens have none. Without a replay of the engines the batch as it is.
    """
    if worker.config.actor_rollout_ref.rollout.router_replay != "engine":
        return batch
    if EXPERT_ROUTES in batch or worker.device_owner is None:
        return batch
    version = worker.device_owner.version(worker.role, worker.step)
    layers, top_k = worker.policy.shape.expert_choices
    attended = batch["attention_mask"].bool()
    table = torch.full((*attended.shape, layers, top_k), -1, dtype=torch.int16)
    for row, sample in enumerate(samples_of(batch)):
        routes = sample.completion.routes
        if routes is not None and routes.version == version:
            chosen = route_tensor(routes)
            columns = attended[row].nonzero().flatten()[: len(chosen)]
            table[row, columns] = chosen[: len(columns)]
    batch = batch.copy()
    batch[EXPERT_ROUTES] = table
    return batch


def route_tensor(routes: ExpertRoutes) -> torch.Tensor:
    """(tokens, layers with experts, top_k) int16."""
    values = np.frombuffer(routes.ids, dtype="<i2" if routes.wide else "u1").astype(np.int16)
    return torch.from_numpy(values).view(-1, routes.layers, routes.top_k)
