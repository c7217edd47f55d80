"""The baseline of a row is the mean of the others in its group."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import GroupedScores, GroupIndex
from ctrl_megatron.algorithms.advantages.registry import register_adv_est


@register_adv_est("rloo")
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: GroupIndex
) -> tuple[torch.Tensor, torch.Tensor]:
    """score - (sum of the group's scores - score) / (k - 1) on every token of the row.

    ``token_level_rewards``, ``response_mask`` (B, R); ``index`` (B,) hashable group ids; k counts
    the rows of the group that have tokens. The advantage of a row alone in its group is 0. Returns
    one (B, R) tensor twice, 0 off the mask. Source: Ahmadian et al., arXiv 2402.14740. Raises
    ValueError if there is not one id per row.
    """
    group = GroupedScores(token_level_rewards, response_mask, index)
    others = group.sum(group.scores) - group.scores
    found = group.over_tokens(group.scores - others / (group.count - 1))
    return found, found
