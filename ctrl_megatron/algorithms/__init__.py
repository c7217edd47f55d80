"""Advantage estimators, policy and value losses, KL: pure tensor functions in registries."""
# ruff: noqa: F401  This file only gathers public names.

from types import ModuleType

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
    get_policy_loss,
)
from ctrl_megatron.algorithms.covariance import (
    log_prob_and_advantage_sums,
    scatter_selection,
    token_random_numbers,
)
from ctrl_megatron.algorithms.group_advantages import (
    compute_cpgd_outcome_advantage,
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from ctrl_megatron.algorithms.groups import GroupedScores, GroupIndex, rows_in_varied_groups
from ctrl_megatron.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    get_kl_controller,
    kl_penalty,
    subtract_kl_penalty,
)
from ctrl_megatron.algorithms.masked import (
    Reduce,
    identity_reduce,
    masked_whiten,
    require_equal_shapes,
    zero_outside_mask,
)
from ctrl_megatron.algorithms.registry import (
    ADV_ESTIMATOR_REGISTRY,
    ESTIMATOR_INPUTS,
    LOSS_INPUTS,
    POLICY_LOSS_REGISTRY,
    PolicyLoss,
    PolicyLossTerms,
    estimate_advantages,
    get_adv_estimator,
    reads_reward_parts,
    register_adv_est,
    register_policy_loss,
    required_estimator_inputs,
)
from ctrl_megatron.algorithms.rollout_correction import (
    RolloutMismatchSums,
    compute_rollout_correction,
    rollout_mismatch_metrics,
    rollout_mismatch_sums,
)
from ctrl_megatron.algorithms.token_advantages import (
    compute_gae_advantage_return,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
)
from ctrl_megatron.algorithms.value_loss import (
    explained_variance,
    explained_variance_sums,
    value_loss_terms,
)
from ctrl_megatron.config.algorithm import AdvantageEstimator

__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    name
    for name, value in vars().items()
    if not name.startswith("_") and not isinstance(value, ModuleType) and value is not ModuleType
)
