"""The baseline of a row is the reward of the greedy response to its prompt."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import floating_dtype
from ctrl_megatron.algorithms.advantages.recursions import discounted_sums
from ctrl_megatron.algorithms.advantages.registry import register_adv_est
from ctrl_megatron.algorithms.masked import check_shapes, masked


@register_adv_est("remax")
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: torch.Tensor, reward_baselines: torch.Tensor, response_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(reward-to-go - baseline of the row, reward-to-go), (B, R) each, 0 off the mask.

    ``token_level_rewards``, ``response_mask`` (B, R); ``reward_baselines`` (B,): the score of the
    greedy response. Source: ReMax, arXiv 2310.10505, algorithm 1. Raises ValueError for shapes that
    differ and if there is not one baseline per row.
    """
    check_shapes(response_mask=response_mask, token_level_rewards=token_level_rewards)
    rows = len(response_mask)
    if reward_baselines.shape != (rows,):
        raise ValueError(
            f"reward_baselines has shape {tuple(reward_baselines.shape)}; remax needs the greedy "
            f"response's score of each row, ({rows},)"
        )
    sums = discounted_sums(token_level_rewards, response_mask, 1.0)
    less = masked(sums - reward_baselines.double().unsqueeze(-1), response_mask)
    dtype = floating_dtype(token_level_rewards)
    return less.to(dtype), sums.to(dtype)
