"""Advantage estimators, policy losses, KL: pure tensor functions in registries."""

from ctrl_megatron.algorithms.advantages import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    gae_advantages,
    get_adv_estimator,
    group_numbers,
    group_statistics,
    register_adv_est,
)
from ctrl_megatron.algorithms.aggregation import LOSS_AGG_MODES, agg_loss
from ctrl_megatron.algorithms.kl_controllers import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    get_kl_controller,
)
from ctrl_megatron.algorithms.kl_estimators import KL_ESTIMATORS, kl_penalty
from ctrl_megatron.algorithms.kl_reward import apply_kl_penalty, penalise
from ctrl_megatron.algorithms.masked import masked, masked_mean, masked_var, masked_whiten
from ctrl_megatron.algorithms.policy_losses import (
    PolicyLossTerms,
    compute_policy_loss_vanilla,
    get_policy_loss,
    get_policy_loss_terms,
    policy_loss_terms,
    register_policy_loss,
    register_policy_loss_terms,
)

__all__ = [
    "KL_ESTIMATORS",
    "LOSS_AGG_MODES",
    "AdaptiveKLController",
    "FixedKLController",
    "KLController",
    "PolicyLossTerms",
    "agg_loss",
    "apply_kl_penalty",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss_vanilla",
    "gae_advantages",
    "get_adv_estimator",
    "get_kl_controller",
    "get_policy_loss",
    "get_policy_loss_terms",
    "group_numbers",
    "group_statistics",
    "kl_penalty",
    "masked",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "penalise",
    "policy_loss_terms",
    "register_adv_est",
    "register_policy_loss",
    "register_policy_loss_terms",
]
