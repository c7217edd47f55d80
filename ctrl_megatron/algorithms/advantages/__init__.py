"""Advantage estimators, one per file; importing the package registers them."""

from ctrl_megatron.algorithms.advantages.gae import compute_gae_advantage_return, gae_advantages
from ctrl_megatron.algorithms.advantages.groups import group_numbers, group_statistics
from ctrl_megatron.algorithms.advantages.grpo import compute_grpo_outcome_advantage
from ctrl_megatron.algorithms.advantages.registry import (
    ADV_ESTIMATOR_REGISTRY,
    get_adv_estimator,
    register_adv_est,
)

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "gae_advantages",
    "get_adv_estimator",
    "group_numbers",
    "group_statistics",
    "register_adv_est",
]
