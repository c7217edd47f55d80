"""A penalty on the tokens of highest covariance, so that the entropy lasts."""

from __future__ import annotations

from typing import Protocol

import torch

from ctrl_megatron.algorithms.masked import masked
from ctrl_megatron.algorithms.policy_losses.covariance import (
    over_tokens,
    select_kl_cov,
    token_covariances,
)
from ctrl_megatron.algorithms.policy_losses.ratios import (
    bounded_exp,
    terms_of,
    weighted,
    whole_batch_loss,
)
from ctrl_megatron.algorithms.policy_losses.registry import (
    PolicyLossTerms,
    TokenSelection,
    register_policy_loss_terms,
)

_OPTIONS = ("kl_cov_ratio", "ppo_kl_coef")


class KlCovConfig(Protocol):
    """What the loss reads of a configuration."""

    @property
    def kl_cov_ratio(self) -> float: ...
    @property
    def ppo_kl_coef(self) -> float: ...


def _covariances(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: KlCovConfig,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    del old_log_prob, config
    return token_covariances(log_prob, advantages, response_mask, sums)


def _choose(
    covariances: torch.Tensor, config: KlCovConfig, generator: torch.Generator | None
) -> torch.Tensor:
    del generator
    return select_kl_cov(covariances, config.kl_cov_ratio)


@register_policy_loss_terms(
    "kl_cov",
    options=_OPTIONS,
    selection=TokenSelection(covariances=_covariances, choose=_choose),
)
def kl_cov_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: KlCovConfig,
    rollout_is_weights: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """Per token, with l = log_prob - old_log_prob: -A exp(l), plus ``ppo_kl_coef`` |l| where
    ``selected`` (B, R) bool is on. Nothing is clipped.

    ``selected`` None takes the ``kl_cov_ratio`` tokens of largest covariance of these rows; pieces
    of a mini-batch need the choice of the whole. All tensors (B, R); nothing off the mask reaches a
    value or a gradient. The log-ratio is bounded to +-20 inside exp. Source: KL-Cov, arXiv
    2505.22617, section 4.2, with |l| for the KL as in the authors' code. Raises ValueError as
    ``select_kl_cov``.
    """
    if selected is None:
        covariances = token_covariances(log_prob, advantages, response_mask)
        selected = over_tokens(
            select_kl_cov(covariances[response_mask.bool()], config.kl_cov_ratio), response_mask
        )
    log_ratio = masked(log_prob - old_log_prob, response_mask)
    gains = masked(advantages, response_mask)
    penalty = config.ppo_kl_coef * masked(log_ratio.abs(), selected)
    loss = -gains * bounded_exp(log_ratio) + penalty
    return terms_of(weighted(loss, rollout_is_weights, response_mask), log_ratio)


compute_policy_loss_kl_cov = whole_batch_loss("kl_cov", kl_cov_terms, options=_OPTIONS)
"""``kl_cov_terms`` of a whole batch; see ``whole_batch_loss``."""
