"""Group-relative advantages."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import (
    GroupIndex,
    group_numbers,
    group_statistics,
)
from ctrl_megatron.algorithms.advantages.registry import register_adv_est
from ctrl_megatron.algorithms.masked import masked


@register_adv_est("grpo")
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(score - group mean) / (group std + epsilon) on every token of the row.

    ``token_level_rewards``, ``response_mask`` (B, R); ``index`` (B,) hashable group ids. A row's
    score is the sum of its token rewards under the mask; the std is unbiased; a group of one has
    mean 0 and std 1. With ``norm_adv_by_std_in_grpo=False`` there is no division (Dr.GRPO, arXiv
    2503.20783). A row without tokens has no score: it is in no statistics and its advantage is 0.

    Returns (advantages, returns): one (B, R) tensor twice, in the dtype of the rewards, 0 off the
    mask. Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2. Raises ValueError if there is not
    one id per row.
    """
    # In float64 equal rewards have a spread of 0, not of one rounding blown up by 1 / epsilon.
    scores = masked(token_level_rewards, response_mask).sum(dim=-1, dtype=torch.float64)
    groups = group_numbers(index, len(scores)).to(scores.device)
    counted = response_mask.bool().any(dim=-1)
    group = group_statistics(scores, groups, counted)
    alone = group.count <= 1
    advantages = scores - torch.where(alone, 0.0, group.mean)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (torch.where(alone, 1.0, group.std) + epsilon)
    dtype = token_level_rewards.dtype
    if not dtype.is_floating_point:
        dtype = torch.float32
    spread = masked(advantages.to(dtype).unsqueeze(-1).expand_as(response_mask), response_mask)
    return spread, spread
