"""Only the best row of a group learns, by its lead over the second best."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import GroupedScores, GroupIndex
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
    twice nobody leads, and the group's advantages are 0, as that of a row alone in its group.
    ``token_level_rewards``, ``response_mask`` (B, R); ``index`` (B,) hashable group ids. Returns
    one (B, R) tensor twice, 0 off the mask. Source: arXiv 2503.19595. Raises ValueError if there is
    not one id per row.
    """
    group = GroupedScores(token_level_rewards, response_mask, index)
    best = group.scores == group.max(group.scores)
    leads = best & (group.sum(best.double()) == 1)
    lead = group.scores - group.max(group.scores.masked_fill(best, -torch.inf))
    if norm_adv_by_std_in_grpo:
        lead = lead / (group.std() + epsilon)
    found = group.over_tokens(torch.where(leads, lead, 0.0))
    return found, found
