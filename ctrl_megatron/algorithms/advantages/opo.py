"""The baseline of a group is its mean score weighted by response length."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import GroupedScores, GroupIndex
from ctrl_megatron.algorithms.advantages.registry import register_adv_est


@register_adv_est("opo")
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: GroupIndex
) -> tuple[torch.Tensor, torch.Tensor]:
    """score - sum(length * score) / sum(length) over the group, on every token of the row.

    The baseline of least gradient variance where a row's squared gradient grows with its length.
    ``token_level_rewards``, ``response_mask`` (B, R); ``index`` (B,) hashable group ids; lengths
    are tokens under the mask. The advantage of a row alone in its group is 0. Returns one (B, R)
    tensor twice, 0 off the mask. Source: OPO, arXiv 2505.23585. Raises ValueError if there is not
    one id per row.
    """
    group = GroupedScores(token_level_rewards, response_mask, index)
    lengths = response_mask.bool().sum(dim=-1).double()
    baseline = group.sum(lengths * group.scores) / group.sum(lengths)
    found = group.over_tokens(group.scores - baseline)
    return found, found
