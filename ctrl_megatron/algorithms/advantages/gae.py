"""Generalised advantage estimation."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.registry import register_adv_est
from ctrl_megatron.algorithms.masked import masked, masked_whiten


@torch.no_grad()
def gae_advantages(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages before whitening, returns), (B, R) each, 0 off the mask.

    With the valid tokens of a row numbered 0, 1, ..., and V = 0 after the last:
    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t.
    Masked tokens are passed over, also in the middle of a row. Source: arXiv 1506.02438,
    equation 16.
    """
    mask = response_mask.bool()
    rewards, values = masked(token_level_rewards, mask), masked(values, mask)
    advantages = torch.zeros_like(values)
    trace = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(mask.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        trace = torch.where(here, delta + gamma * lam * trace, trace)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = trace
    advantages = masked(advantages, mask)
    return advantages, advantages + values


@register_adv_est("gae")
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``gae_advantages`` with the advantages whitened over the mask of these rows; returns are not.

    All inputs (B, R). Who holds a piece of a batch calls ``gae_advantages`` and whitens with the
    moments of the whole batch. Raises ValueError if the mask selects fewer than two tokens.
    """
    advantages, returns = gae_advantages(token_level_rewards, values, response_mask, gamma, lam)
    return masked_whiten(advantages, response_mask), returns
