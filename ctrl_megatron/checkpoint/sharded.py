"""Weights and optimizer state in Megatron's distributed checkpoint format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from ctrl_megatron.models.parallel_model import ParallelModel

_METADATA = {
    # The one optimizer format that is saved on a CPU and loaded on another TP x PP x DP layout.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


def save_sharded(model: ParallelModel, directory: Path) -> None:
    """Write this model's shards into the existing, empty ``directory``. Collective."""
    dist_checkpointing.save(
        _sharded_state(model, loading=False), str(directory), validate_access_integrity=True
    )


def load_sharded(model: ParallelModel, directory: Path) -> None:
    """Fill the model's weights and optimizer from ``directory``. Collective.

    Raises whatever Megatron reports for missing or misshapen tensors; nothing is skipped.
    """
    state: Any = dist_checkpointing.load(_sharded_state(model, loading=True), str(directory))
    for index, chunk in enumerate(model.models):
        chunk.load_state_dict(state[f"model{index}"], strict=True)
    if model.optimization is not None:
        model.optimization.load_state_dict(state["optimizer"], state["scheduler"])


def _sharded_state(model: ParallelModel, *, loading: bool) -> dict[str, Any]:
    model.onload()
    on_cpu = next(model.models[0].parameters()).device.type == "cpu"
    # Ranks on a CPU share its memory: only the first data-parallel one holds what is gathered.
    metadata = {**_METADATA, "distrib_optim_fully_reshardable_mem_efficient": on_cpu}
    state: dict[str, Any] = {}
    for index, chunk in enumerate(model.models):
        state[f"model{index}"] = chunk.sharded_state_dict(metadata=metadata)
    if model.optimization is not None:
        # Also for a model that has not learned yet, as an actor in the critic's warm-up.
        model.optimization.create_state()
        weights = state if len(model.models) > 1 else state["model0"]
        optimizer = model.optimization.optimizer.sharded_state_dict(
            weights, is_loading=loading, metadata=metadata
        )
        if "param_state" in optimizer and optimizer["param_state"] is None:
            # A rank that has nothing to save; Megatron warns that the ranks' keys differ.
            del optimizer["param_state"]
        state["optimizer"] = optimizer
        state["scheduler"] = model.optimization.scheduler.state_dict()
    return state
