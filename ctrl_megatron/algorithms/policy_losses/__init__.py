"""Policy losses, one per file; importing the package registers them."""

from ctrl_megatron.algorithms.policy_losses.cispo import cispo_terms, compute_policy_loss_cispo
from ctrl_megatron.algorithms.policy_losses.clip_cov import (
    clip_cov_covariances,
    clip_cov_terms,
    compute_policy_loss_clip_cov,
)
from ctrl_megatron.algorithms.policy_losses.covariance import (
    covariance_sums,
    over_tokens,
    select_clip_cov,
    select_kl_cov,
    token_covariances,
)
from ctrl_megatron.algorithms.policy_losses.cpgd import compute_policy_loss_cpgd, cpgd_terms
from ctrl_megatron.algorithms.policy_losses.geo_mean import (
    compute_policy_loss_geo_mean,
    geo_mean_terms,
)
from ctrl_megatron.algorithms.policy_losses.gpg import compute_policy_loss_gpg, gpg_terms
from ctrl_megatron.algorithms.policy_losses.gspo import compute_policy_loss_gspo, gspo_terms
from ctrl_megatron.algorithms.policy_losses.kl_cov import compute_policy_loss_kl_cov, kl_cov_terms
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
from ctrl_megatron.algorithms.policy_losses.vanilla import (
    compute_policy_loss_vanilla,
    policy_loss_terms,
)

__all__ = [
    "POLICY_LOSS_REGISTRY",
    "PolicyLossTerms",
    "TokenSelection",
    "cispo_terms",
    "clip_cov_covariances",
    "clip_cov_terms",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_cpgd",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_vanilla",
    "covariance_sums",
    "cpgd_terms",
    "geo_mean_terms",
    "get_policy_loss",
    "get_policy_loss_terms",
    "gpg_terms",
    "gspo_terms",
    "kl_cov_terms",
    "over_tokens",
    "policy_loss_names",
    "policy_loss_options",
    "policy_loss_terms",
    "register_policy_loss",
    "register_policy_loss_terms",
    "select_clip_cov",
    "select_kl_cov",
    "token_covariances",
    "token_selection",
]
