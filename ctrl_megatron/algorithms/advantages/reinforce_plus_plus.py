"""REINFORCE++: advantages are scaled by the whole batch instead of the group."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import GroupedScores, GroupIndex, floating_dtype
from ctrl_megatron.algorithms.advantages.recursions import discounted_sums
from ctrl_megatron.algorithms.advantages.registry import register_adv_est
from ctrl_megatron.algorithms.masked import Reduce, check_shapes, masked_whiten, nothing_to_add


@register_adv_est("reinforce_plus_plus")
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    reduce: Reduce = nothing_to_add,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(whitened returns, returns): G_t = r_t + gamma G_{t+1} over a row's valid tokens.

    Inputs (B, R); outputs (B, R) in the rewards' dtype, 0 off the mask. Source: arXiv 2501.03262.
    Raises ValueError for shapes that differ and if the mask selects fewer than two tokens.
    """
    check_shapes(response_mask=response_mask, token_level_rewards=token_level_rewards)
    sums = discounted_sums(token_level_rewards, response_mask, gamma)
    returns = sums.to(floating_dtype(token_level_rewards))
    return masked_whiten(returns, response_mask, reduce=reduce), returns


@register_adv_est("reinforce_plus_plus_baseline")
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    reduce: Reduce = nothing_to_add,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(whitened returns, returns), the latter score - group mean on every token of the row.

    ``token_level_rewards``, ``response_mask`` (B, R); ``index`` (B,) hashable group ids. The return
    of a row alone in its group is 0. Every token counts once in the moments, so long rows weigh
    more. Source: arXiv 2501.03262, the variant with a baseline. Raises ValueError for ids that do
    not fit the rows and if the mask selects fewer than two tokens.
    """
    group = GroupedScores(token_level_rewards, response_mask, index)
    returns = group.over_tokens(group.scores - group.mean())
    return masked_whiten(returns, response_mask, reduce=reduce), returns
