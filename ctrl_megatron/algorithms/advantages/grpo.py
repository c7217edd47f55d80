"""Group-relative advantages."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import GroupedScores, GroupIndex
from ctrl_megatron.algorithms.advantages.registry import register_adv_est


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
    score is the sum of its token rewards under the mask; the std is unbiased. With
    ``norm_adv_by_std_in_grpo=False`` there is no division (Dr.GRPO, arXiv 2503.20783). A row
    without tokens has no score: it is in no statistics and its advantage is 0. So is that of a row
    alone in its group (verl gives it its score).

    Returns (advantages, returns): one (B, R) tensor twice, in the dtype of the rewards, 0 off the
    mask. Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2. Raises ValueError if there is not
    one id per row.
    """
    group = GroupedScores(token_level_rewards, response_mask, index)
    advantages = group.scores - group.mean()
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (group.std() + epsilon)
    found = group.over_tokens(advantages)
    return found, found
