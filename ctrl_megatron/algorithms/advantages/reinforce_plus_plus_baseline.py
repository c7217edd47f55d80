"""Scores less their group's mean, whitened over the batch instead of over the group."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import GroupIndex, centred, group_statistics
from ctrl_megatron.algorithms.advantages.outcome import outcomes, spread_over_tokens
from ctrl_megatron.algorithms.advantages.registry import register_adv_est, register_adv_stages
from ctrl_megatron.algorithms.advantages.whitening import WHITENING, whitened


@torch.no_grad()
def centred_scores(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: GroupIndex
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages before whitening, returns): score - group mean on every token, twice.

    (B, R), 0 off the mask. A group of one keeps its score, as in ``grpo``; a row without tokens is
    not a member. Raises ValueError if there is not one id per row.
    """
    found = outcomes(token_level_rewards, response_mask, index)
    advantages = centred(found.scores, group_statistics(*found))
    spread = spread_over_tokens(advantages, token_level_rewards, response_mask)
    return spread, spread


@register_adv_est("reinforce_plus_plus_baseline")
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: GroupIndex
) -> tuple[torch.Tensor, torch.Tensor]:
    """``centred_scores`` with the advantages whitened over the mask of these rows.

    ``token_level_rewards``, ``response_mask`` (B, R); ``index`` (B,) hashable group ids. Every
    token counts once in the moments, so long rows weigh more. Source: REINFORCE++, arXiv
    2501.03262, the variant with a baseline. Raises ValueError for ids that do not fit the rows and
    if the mask selects fewer than two tokens.
    """
    advantages, returns = centred_scores(token_level_rewards, response_mask, index)
    return whitened(advantages, response_mask), returns


register_adv_stages("reinforce_plus_plus_baseline", raw=centred_scores, scale=WHITENING)
