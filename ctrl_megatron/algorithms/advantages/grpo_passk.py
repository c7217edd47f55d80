"""Only the best row of a group learns, by its lead over the second best."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import (
    GroupIndex,
    group_extremes,
    group_statistics,
    group_sums,
)
from ctrl_megatron.algorithms.advantages.outcome import outcomes, spread_over_tokens
from ctrl_megatron.algorithms.advantages.registry import register_adv_est


@register_adv_est("grpo_passk")
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Best - second best score on the tokens of the best row, 0 on all others.

    Divided by (group std + epsilon) with ``norm_adv_by_std_in_grpo``. Where the best score occurs
    twice nobody leads, and the group's advantages are 0. A group of one has second best 0 and std
    1, as the mean and std in ``grpo``. ``token_level_rewards``, ``response_mask`` (B, R); ``index``
    (B,) hashable group ids. Returns one (B, R) tensor twice, 0 off the mask. Source: arXiv
    2503.19595. Raises ValueError if there is not one id per row.
    """
    scores, groups, counted = outcomes(token_level_rewards, response_mask, index)
    group = group_statistics(scores, groups, counted)
    best = counted & (scores == group_extremes(scores, groups, counted)[1])
    leads = group_sums(best.to(scores.dtype), groups, counted) == 1
    second = group_extremes(scores, groups, counted & ~best)[1]
    alone = group.count <= 1
    lead = scores - torch.where(alone, 0.0, second)
    if norm_adv_by_std_in_grpo:
        lead = lead / (torch.where(alone, 1.0, group.std) + epsilon)
    advantages = torch.where(best & leads, lead, 0.0)
    spread = spread_over_tokens(advantages, token_level_rewards, response_mask)
    return spread, spread
