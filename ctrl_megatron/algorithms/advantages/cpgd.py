"""Centred scores with one of three weights."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import GroupedScores, GroupIndex
from ctrl_megatron.algorithms.advantages.registry import register_adv_est
from ctrl_megatron.algorithms.masked import Reduce, nothing_to_add

_WEIGHTS = ("STD_weight", "clip_filter_like_weight", "naive")
_LARGEST_WEIGHT = 3.0


@register_adv_est("cpgd")
@torch.no_grad()
def compute_cpgd_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    weight_factor_in_cpgd: str = "STD_weight",
    reduce: Reduce = nothing_to_add,
) -> tuple[torch.Tensor, torch.Tensor]:
    """weight * (score - group mean) on every token; returns are before the batch's weight.

    The weight is 1 / (group std + epsilon) for ``STD_weight``, 1 for ``naive``, and for
    ``clip_filter_like_weight`` min(groups / groups whose scores are not all equal, 3), counted in
    the whole batch. ``token_level_rewards``, ``response_mask`` (B, R); ``index`` (B,) hashable
    group ids. The advantage of a row alone in its group is 0. Source: CPGD, arXiv 2505.12504.
    Raises ValueError for another weight and if there is not one id per row.
    """
    if weight_factor_in_cpgd not in _WEIGHTS:
        raise ValueError(
            f"unknown weight_factor_in_cpgd {weight_factor_in_cpgd!r}; known: {', '.join(_WEIGHTS)}"
        )
    group = GroupedScores(token_level_rewards, response_mask, index)
    advantages = group.scores - group.mean()
    if weight_factor_in_cpgd == "STD_weight":
        advantages = advantages / (group.std() + epsilon)
    returns = group.over_tokens(advantages)
    if weight_factor_in_cpgd != "clip_filter_like_weight":
        return returns, returns
    share = torch.where(group.counted, 1 / group.count, 0.0)
    differ = group.max(group.scores) > -group.max(-group.scores)
    sums = reduce(torch.stack([share.sum(), torch.where(differ, share, 0.0).sum()]))
    # A share per row adds up to whole groups only up to rounding.
    groups, telling = sums.round().unbind()
    return returns * (groups / telling.clamp(min=1)).clamp(max=_LARGEST_WEIGHT), returns
