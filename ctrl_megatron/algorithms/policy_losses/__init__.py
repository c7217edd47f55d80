"""Policy losses, one per file; importing the package registers them."""

from ctrl_megatron.algorithms.policy_losses.registry import (
    POLICY_LOSS_REGISTRY,
    PolicyLossTerms,
    get_policy_loss,
    get_policy_loss_terms,
    register_policy_loss,
    register_policy_loss_terms,
)
from ctrl_megatron.algorithms.policy_losses.vanilla import (
    compute_policy_loss_vanilla,
    policy_loss_terms,
)

__all__ = [
    "POLICY_LOSS_REGISTRY",
    "PolicyLossTerms",
    "compute_policy_loss_vanilla",
    "get_policy_loss",
    "get_policy_loss_terms",
    "policy_loss_terms",
    "register_policy_loss",
    "register_policy_loss_terms",
]
