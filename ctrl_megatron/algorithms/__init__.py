"""Advantage estimators, policy and value losses, KL: pure tensor functions in registries."""

from ctrl_megatron.algorithms.advantages.cpgd import compute_cpgd_outcome_advantage
from ctrl_megatron.algorithms.advantages.gae import compute_gae_advantage_return
from ctrl_megatron.algorithms.advantages.gpg import compute_gpg_outcome_advantage
from ctrl_megatron.algorithms.advantages.groups import (
    GroupedScores,
    GroupIndex,
    groups_with_signal,
)
from ctrl_megatron.algorithms.advantages.grpo import compute_grpo_outcome_advantage
from ctrl_megatron.algorithms.advantages.grpo_passk import compute_grpo_passk_outcome_advantage
from ctrl_megatron.algorithms.advantages.opo import compute_opo_outcome_advantage
from ctrl_megatron.algorithms.advantages.registry import (
    ADV_ESTIMATOR_REGISTRY,
    estimate_advantages,
    estimator_inputs,
    get_adv_estimator,
    register_adv_est,
)
from ctrl_megatron.algorithms.advantages.reinforce_plus_plus import (
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
)
from ctrl_megatron.algorithms.advantages.remax import compute_remax_outcome_advantage
from ctrl_megatron.algorithms.advantages.rloo import compute_rloo_outcome_advantage
from ctrl_megatron.algorithms.aggregation import LOSS_AGG_MODES, agg_loss
from ctrl_megatron.algorithms.core_algos import (
    apply_kl_penalty,
    compute_policy_loss,
    compute_policy_loss_cispo,
    compute_policy_loss_clip_cov,
    compute_policy_loss_cpgd,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gpg,
    compute_policy_loss_gspo,
    compute_policy_loss_kl_cov,
    compute_policy_loss_vanilla,
    compute_value_loss,
)
from ctrl_megatron.algorithms.kl import KL_ESTIMATORS, kl_penalty, penalise
from ctrl_megatron.algorithms.kl_controllers import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    get_kl_controller,
)
from ctrl_megatron.algorithms.masked import (
    Reduce,
    check_shapes,
    masked,
    masked_mean,
    masked_whiten,
    nothing_to_add,
)
from ctrl_megatron.algorithms.policy_losses.covariance import covariance_sums, over_tokens
from ctrl_megatron.algorithms.policy_losses.registry import (
    POLICY_LOSS_REGISTRY,
    PolicyLossTerms,
    TokenSelection,
    get_policy_loss,
    get_policy_loss_terms,
    policy_loss_names,
    policy_loss_options,
    register_policy_loss,
    register_policy_loss_terms,
    token_selection,
)
from ctrl_megatron.algorithms.rollout_correction import (
    ROLLOUT_IS,
    ROLLOUT_RS,
    CorrectedRollout,
    MismatchSums,
    correct_rollout,
    mismatch_metrics,
    mismatch_sums,
)
from ctrl_megatron.algorithms.value_loss import (
    ValueLossTerms,
    explained_variance,
    explained_variance_sums,
    value_loss_terms,
)

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "KL_ESTIMATORS",
    "LOSS_AGG_MODES",
    "POLICY_LOSS_REGISTRY",
    "ROLLOUT_IS",
    "ROLLOUT_RS",
    "AdaptiveKLController",
    "CorrectedRollout",
    "FixedKLController",
    "GroupIndex",
    "GroupedScores",
    "KLController",
    "MismatchSums",
    "PolicyLossTerms",
    "Reduce",
    "TokenSelection",
    "ValueLossTerms",
    "agg_loss",
    "apply_kl_penalty",
    "check_shapes",
    "compute_cpgd_outcome_advantage",
    "compute_gae_advantage_return",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_policy_loss",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_cpgd",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_value_loss",
    "correct_rollout",
    "covariance_sums",
    "estimate_advantages",
    "estimator_inputs",
    "explained_variance",
    "explained_variance_sums",
    "get_adv_estimator",
    "get_kl_controller",
    "get_policy_loss",
    "get_policy_loss_terms",
    "groups_with_signal",
    "kl_penalty",
    "masked",
    "masked_mean",
    "masked_whiten",
    "mismatch_metrics",
    "mismatch_sums",
    "nothing_to_add",
    "over_tokens",
    "penalise",
    "policy_loss_names",
    "policy_loss_options",
    "register_adv_est",
    "register_policy_loss",
    "register_policy_loss_terms",
    "token_selection",
    "value_loss_terms",
]
