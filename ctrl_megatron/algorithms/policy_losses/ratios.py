"""What the losses share: the log-ratio, the clip range, the step from terms to scalars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ctrl_megatron.algorithms.aggregation import agg_loss
from ctrl_megatron.algorithms.masked import masked, row_counts
from ctrl_megatron.algorithms.policy_losses.registry import (
    PolicyLossFn,
    PolicyLossTerms,
    PolicyLossTermsFn,
    register_policy_loss,
)

# Ratios beyond exp(20) say nothing more; without the bound one stale token could give inf * 0.
LOG_RATIO_BOUND = 20.0
RANGE_OPTIONS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")


class RangeConfig(Protocol):
    """What a loss with a clip range reads of a configuration."""

    @property
    def clip_ratio(self) -> float: ...
    @property
    def clip_ratio_low(self) -> float | None: ...
    @property
    def clip_ratio_high(self) -> float | None: ...


def clip_sides(config: RangeConfig) -> tuple[float, float]:
    """(low, high): a side that is None takes ``clip_ratio``, 0.0 is kept.

    Raises ValueError for a negative side.
    """
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    if not (low >= 0 and high >= 0):
        raise ValueError(f"clip ratios must be at least 0, got low={low} and high={high}")
    return low, high


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of the log-ratio bounded to +-20."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def row_means(values: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(B, 1) mean of each row of (B, R) values that are 0 off the mask; 0 for a row without
    tokens."""
    tokens = row_counts(response_mask).unsqueeze(-1).clamp(min=1)
    return values.sum(dim=-1, keepdim=True) / tokens


def weighted(
    loss: torch.Tensor, rollout_is_weights: torch.Tensor | None, response_mask: torch.Tensor
) -> torch.Tensor:
    """``loss`` times the weights under the mask, or as it is without weights."""
    if rollout_is_weights is None:
        return loss
    return loss * masked(rollout_is_weights, response_mask)


def terms_of(
    loss: torch.Tensor,
    log_ratio: torch.Tensor,
    clipped: torch.Tensor | None = None,
    clipped_lower: torch.Tensor | None = None,
) -> PolicyLossTerms:
    """Terms of (B, R) parts that are 0 off the mask; a share that a loss does not have is 0."""

    def share(where: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros_like(log_ratio) if where is None else where.to(log_ratio.dtype)

    with torch.no_grad():
        return PolicyLossTerms(
            loss=loss,
            clipped=share(clipped),
            approx_kl=-log_ratio.detach(),
            clipped_lower=share(clipped_lower),
        )


def whole_batch_loss(
    name: str,
    terms: PolicyLossTermsFn,
    *,
    options: Sequence[str] = (),
    loss_agg_mode: str = "token-mean",
) -> PolicyLossFn:
    """Register and return ``compute_policy_loss_<name>``, the loss of a whole batch.

    It takes ``old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
    rollout_is_weights`` and what else ``terms`` takes by name, and returns four scalars
    (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower): the loss by ``loss_agg_mode`` (whose default
    is the one given here), the others as means over tokens, without gradient. Pieces of a batch are
    for ``terms`` and ``agg_loss`` with global denominators. It raises ValueError naming the
    ``options`` of ``config`` where these are read and it is None.
    """
    default_mode = loss_agg_mode

    def compute(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = default_mode,
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
        **selection: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        if config is None and options:
            names = f"{', '.join(options[:-1])} and {options[-1]}"
            raise ValueError(f"{compute.__name__} needs config: an object with {names}")
        found = terms(
            old_log_prob,
            log_prob,
            advantages,
            response_mask,
            config,
            rollout_is_weights,
            **selection,
        )
        return (
            agg_loss(found.loss, response_mask, loss_agg_mode),
            agg_loss(found.clipped, response_mask, "token-mean"),
            agg_loss(found.approx_kl, response_mask, "token-mean"),
            agg_loss(found.clipped_lower, response_mask, "token-mean"),
        )

    compute.__name__ = compute.__qualname__ = f"compute_policy_loss_{name}"
    return register_policy_loss(name)(compute)
