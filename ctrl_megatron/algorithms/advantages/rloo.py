"""The baseline of a row is the mean of the others in its group."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import GroupIndex, group_sums
from ctrl_megatron.algorithms.advantages.outcome import outcomes, spread_over_tokens
from ctrl_megatron.algorithms.advantages.registry import register_adv_est


@register_adv_est("rloo")
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: GroupIndex
) -> tuple[torch.Tensor, torch.Tensor]:
    """score - (sum of the group's scores - score) / (k - 1) on every token of the row.

    ``token_level_rewards``, ``response_mask`` (B, R); ``index`` (B,) hashable group ids. A group of
    one has no baseline: its advantage is its score, as in ``grpo``. A row without tokens is not a
    member. Returns one (B, R) tensor twice, 0 off the mask. Source: Ahmadian et al., arXiv
    2402.14740. Raises ValueError if there is not one id per row.
    """
    scores, groups, counted = outcomes(token_level_rewards, response_mask, index)
    count = group_sums(torch.ones_like(scores), groups, counted)
    others = group_sums(scores, groups, counted) - scores
    baseline = torch.where(count <= 1, 0.0, others / (count - 1))
    spread = spread_over_tokens(scores - baseline, token_level_rewards, response_mask)
    return spread, spread
