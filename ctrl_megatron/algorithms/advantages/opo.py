"""The baseline of a group is its mean score weighted by response length."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import GroupIndex, group_sums
from ctrl_megatron.algorithms.advantages.outcome import outcomes, spread_over_tokens
from ctrl_megatron.algorithms.advantages.registry import register_adv_est
from ctrl_megatron.algorithms.masked import row_counts


@register_adv_est("opo")
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: GroupIndex
) -> tuple[torch.Tensor, torch.Tensor]:
    """score - sum(length * score) / sum(length) over the group, on every token of the row.

    The baseline of least gradient variance where a row's squared gradient grows with its length.
    ``token_level_rewards``, ``response_mask`` (B, R); ``index`` (B,) hashable group ids; lengths
    are tokens under the mask. A group of one has no baseline: its advantage is its score, as in
    ``grpo``. Returns one (B, R) tensor twice, 0 off the mask. Source: OPO, arXiv 2505.23585.
    Raises ValueError if there is not one id per row.
    """
    scores, groups, counted = outcomes(token_level_rewards, response_mask, index)
    lengths = row_counts(response_mask).to(scores.dtype)
    weighted = group_sums(lengths * scores, groups, counted) / group_sums(lengths, groups, counted)
    count = group_sums(torch.ones_like(scores), groups, counted)
    advantages = scores - torch.where(count <= 1, 0.0, weighted)
    spread = spread_over_tokens(advantages, token_level_rewards, response_mask)
    return spread, spread
