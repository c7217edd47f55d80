"""Discounted returns, whitened over the batch."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.registry import register_adv_est, register_adv_stages
from ctrl_megatron.algorithms.advantages.scans import discounted_sums
from ctrl_megatron.algorithms.advantages.whitening import WHITENING, whitened


@torch.no_grad()
def discounted_returns(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, gamma: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages before whitening, returns): the same (B, R) tensor twice, 0 off the mask.

    G_t = r_t + gamma G_{t+1} over a row's valid tokens, starting anew in each row. Masked tokens
    are passed over, as in ``gae``.
    """
    return discounted_sums(token_level_rewards, response_mask, gamma)


@register_adv_est("reinforce_plus_plus")
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, gamma: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``discounted_returns`` with the advantages whitened over the mask of these rows.

    Inputs (B, R). Source: REINFORCE++, arXiv 2501.03262. Pieces of a batch are for
    ``estimate_advantages``. Raises ValueError if the mask selects fewer than two tokens.
    """
    advantages, returns = discounted_returns(token_level_rewards, response_mask, gamma)
    return whitened(advantages, response_mask), returns


register_adv_stages("reinforce_plus_plus", raw=discounted_returns, scale=WHITENING)
