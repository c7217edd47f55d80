"""Advantage estimators, one per file; importing the package registers them."""

from ctrl_megatron.algorithms.advantages.cpgd import (
    CPGD_WEIGHTS,
    compute_cpgd_outcome_advantage,
    unscaled_cpgd_advantages,
)
from ctrl_megatron.algorithms.advantages.gae import compute_gae_advantage_return, gae_advantages
from ctrl_megatron.algorithms.advantages.gpg import (
    compute_gpg_outcome_advantage,
    unscaled_gpg_advantages,
)
from ctrl_megatron.algorithms.advantages.groups import (
    GroupIndex,
    group_numbers,
    group_statistics,
    without_spread,
)
from ctrl_megatron.algorithms.advantages.grpo import compute_grpo_outcome_advantage
from ctrl_megatron.algorithms.advantages.grpo_passk import compute_grpo_passk_outcome_advantage
from ctrl_megatron.algorithms.advantages.opo import compute_opo_outcome_advantage
from ctrl_megatron.algorithms.advantages.registry import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageStages,
    BatchScale,
    advantage_stages,
    estimate_advantages,
    estimator_inputs,
    get_adv_estimator,
    register_adv_est,
    register_adv_stages,
)
from ctrl_megatron.algorithms.advantages.reinforce_plus_plus import (
    compute_reinforce_plus_plus_outcome_advantage,
    discounted_returns,
)
from ctrl_megatron.algorithms.advantages.reinforce_plus_plus_baseline import (
    centred_scores,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
)
from ctrl_megatron.algorithms.advantages.remax import compute_remax_outcome_advantage
from ctrl_megatron.algorithms.advantages.rloo import compute_rloo_outcome_advantage

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "CPGD_WEIGHTS",
    "AdvantageStages",
    "BatchScale",
    "GroupIndex",
    "advantage_stages",
    "centred_scores",
    "compute_cpgd_outcome_advantage",
    "compute_gae_advantage_return",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "discounted_returns",
    "estimate_advantages",
    "estimator_inputs",
    "gae_advantages",
    "get_adv_estimator",
    "group_numbers",
    "group_statistics",
    "register_adv_est",
    "register_adv_stages",
    "unscaled_cpgd_advantages",
    "unscaled_gpg_advantages",
    "without_spread",
]
