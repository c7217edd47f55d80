"""Policy weights and optimizer state in Megatron's distributed checkpoint format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from ctrl_megatron.models.policy import Policy

_METADATA = {
    # The one optimizer format that is saved on a CPU and loaded on another TP x PP x DP layout.
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}


def save_sharded(policy: Policy, directory: Path) -> None:
    """Write this policy's shards into the existing, empty ``directory``. Collective."""
    dist_checkpointing.save(
        _sharded_state(policy, loading=False), str(directory), validate_access_integrity=True
    )


def load_sharded(policy: Policy, directory: Path) -> None:
    """Fill the policy's weights and optimizer from ``directory``. Collective.

    Raises whatever Megatron reports for missing or misshapen tensors; nothing is skipped.
    """
    if policy.optimization is not None:
        policy.optimization.create_state()
    state: Any = dist_checkpointing.load(_sharded_state(policy, loading=True), str(directory))
    for index, model in enumerate(policy.models):
        model.load_state_dict(state[f"model{index}"], strict=True)
    if policy.optimization is not None:
        policy.optimization.load_state_dict(state["optimizer"], state["scheduler"])


def _sharded_state(policy: Policy, *, loading: bool) -> dict[str, Any]:
    policy.onload()
    state: dict[str, Any] = {}
    for index, model in enumerate(policy.models):
        state[f"model{index}"] = model.sharded_state_dict(metadata=_METADATA)
    if policy.optimization is not None:
        weights = state if len(policy.models) > 1 else state["model0"]
        state["optimizer"] = policy.optimization.optimizer.sharded_state_dict(
            weights, is_loading=loading, metadata=_METADATA
        )
        state["scheduler"] = policy.optimization.scheduler.state_dict()
    return state
