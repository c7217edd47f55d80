"""Centred scores, scaled up by the share of rows that say nothing."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import GroupedScores, GroupIndex
from ctrl_megatron.algorithms.advantages.registry import register_adv_est
from ctrl_megatron.algorithms.masked import Reduce, nothing_to_add

# Differences to the mean below this share of the group's largest score are rounding.
_ROUNDING = 1e-12


@register_adv_est("gpg")
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIndex,
    f_norm: float = 1.0,
    reduce: Reduce = nothing_to_add,
) -> tuple[torch.Tensor, torch.Tensor]:
    """alpha (score - group mean) / ``f_norm`` on every token; returns are without alpha.

    alpha = B / (B - M) with B rows, M of them with advantage 0, in the whole batch: rows without a
    gradient do not water down the others. Exactly 0 where the score is the group's mean up to
    rounding, and for a row alone in its group. ``token_level_rewards``, ``response_mask`` (B, R);
    ``index`` (B,) hashable group ids. Source: GPG, arXiv 2504.02546. (verl counts rows whose score
    is 0 instead of those whose advantage is 0; that would change with the offset of the reward.)
    Raises ValueError for an ``f_norm`` that is not positive and if there is not one id per row.
    """
    if not f_norm > 0:
        raise ValueError(f"f_norm must be positive, got {f_norm}")
    group = GroupedScores(token_level_rewards, response_mask, index)
    advantages = group.scores - group.mean()
    rounding = _ROUNDING * group.max(group.scores.abs())
    returns = group.over_tokens(torch.where(advantages.abs() <= rounding, 0.0, advantages) / f_norm)
    telling = (returns != 0).any(dim=-1).sum()
    rows, telling = reduce(torch.stack([group.counted.sum(), telling]).double()).unbind()
    return returns * (rows / telling.clamp(min=1)), returns
