"""Centred scores with one of three weights."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import (
    GroupIndex,
    centred,
    group_statistics,
    group_sums,
    without_spread,
)
from ctrl_megatron.algorithms.advantages.outcome import outcomes, spread_over_tokens
from ctrl_megatron.algorithms.advantages.registry import (
    BatchScale,
    register_adv_est,
    register_adv_stages,
)

_FILTER = "clip_filter_like_weight"
CPGD_WEIGHTS = ("STD_weight", _FILTER, "naive")
_LARGEST_WEIGHT = 3.0


@torch.no_grad()
def unscaled_cpgd_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    weight_factor_in_cpgd: str = "STD_weight",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The advantages before the weight that needs the whole batch: (B, R), twice.

    (score - mean) / (std + epsilon) for ``STD_weight``, score - mean for the others. Raises
    ValueError for another weight and if there is not one id per row.
    """
    if weight_factor_in_cpgd not in CPGD_WEIGHTS:
        raise ValueError(
            f"unknown weight_factor_in_cpgd {weight_factor_in_cpgd!r}; "
            f"known: {', '.join(CPGD_WEIGHTS)}"
        )
    found = outcomes(token_level_rewards, response_mask, index)
    group = group_statistics(*found)
    advantages = centred(found.scores, group)
    if weight_factor_in_cpgd == "STD_weight":
        advantages = advantages / (torch.where(group.count <= 1, 1.0, group.std) + epsilon)
    spread = spread_over_tokens(advantages, token_level_rewards, response_mask)
    return spread, spread


def _sums(
    advantages: torch.Tensor,
    *,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    weight_factor_in_cpgd: str = "STD_weight",
    **_others: object,
) -> torch.Tensor:
    """Groups; groups whose scores are not all equal. Zeros where nobody asks."""
    if weight_factor_in_cpgd != _FILTER:
        return torch.zeros(2, dtype=torch.float64, device=advantages.device)
    found = outcomes(token_level_rewards, response_mask, index)
    share = found.counted / group_sums(torch.ones_like(found.scores), *found[1:]).clamp(min=1)
    return torch.stack([share.sum(), torch.where(without_spread(*found), 0.0, share).sum()])


def _apply(
    advantages: torch.Tensor,
    sums: torch.Tensor,
    *,
    weight_factor_in_cpgd: str = "STD_weight",
    **_others: object,
) -> torch.Tensor:
    if weight_factor_in_cpgd != _FILTER:
        return advantages
    # A share per row adds up to whole groups only up to rounding.
    groups, telling = sums.round().unbind()
    return advantages * (groups / telling.clamp(min=1)).clamp(max=_LARGEST_WEIGHT)


_FILTER_WEIGHT = BatchScale(sums=_sums, apply=_apply)


@register_adv_est("cpgd")
@torch.no_grad()
def compute_cpgd_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    weight_factor_in_cpgd: str = "STD_weight",
) -> tuple[torch.Tensor, torch.Tensor]:
    """weight * (score - group mean) on every token; returns are before the batch's weight.

    The weight is 1 / (group std + epsilon) for ``STD_weight``, 1 for ``naive``, and for
    ``clip_filter_like_weight`` min(groups / groups whose scores are not all equal, 3).
    ``token_level_rewards``, ``response_mask`` (B, R); ``index`` (B,) hashable group ids. A group of
    one has mean 0 and std 1, as in ``grpo``. Source: CPGD, arXiv 2505.12504. Pieces of a
    batch are for ``estimate_advantages``. Raises ValueError as ``unscaled_cpgd_advantages`` does.
    """
    advantages, returns = unscaled_cpgd_advantages(
        token_level_rewards, response_mask, index, epsilon, weight_factor_in_cpgd
    )
    sums = _sums(
        advantages,
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        index=index,
        weight_factor_in_cpgd=weight_factor_in_cpgd,
    )
    return _apply(advantages, sums, weight_factor_in_cpgd=weight_factor_in_cpgd), returns


register_adv_stages("cpgd", raw=unscaled_cpgd_advantages, scale=_FILTER_WEIGHT)
