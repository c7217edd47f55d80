"""Generalised advantage estimation."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.outcome import floating
from ctrl_megatron.algorithms.advantages.registry import register_adv_est, register_adv_stages
from ctrl_megatron.algorithms.advantages.scans import (
    columns_from_the_end,
    discount_,
    nearest_values,
    put,
)
from ctrl_megatron.algorithms.advantages.whitening import WHITENING, whitened
from ctrl_megatron.algorithms.shapes import check_shapes


@torch.no_grad()
def gae_advantages(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages before whitening, returns), (B, R) each in the rewards' dtype, 0 off the mask.

    With the valid tokens of a row numbered 0, 1, ..., and V = 0 after the last:
    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t.
    Masked tokens are passed over, also in the middle of a row. Source: arXiv 1506.02438,
    equation 16. Raises ValueError for shapes that differ.
    """
    check_shapes(
        response_mask=response_mask, token_level_rewards=token_level_rewards, values=values
    )
    advantages = torch.empty_like(floating(token_level_rewards))
    returns = torch.empty_like(advantages)
    advantage_after = value_after = values.new_zeros(len(advantages), dtype=torch.float64)
    for columns in columns_from_the_end(response_mask, token_level_rewards, values):
        sums, own = columns.values
        nearest = nearest_values(own, columns.on, value_after)
        sums.sub_(own).add_(nearest[1:].masked_fill_(~columns.on.t(), 0), alpha=gamma)
        discount_(sums, columns.on, advantage_after, gamma * lam)
        advantage_after, value_after = sums[0], nearest[0]
        put(advantages, columns, sums)
        put(returns, columns, sums.add(own))
    return advantages, returns


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

    All inputs (B, R). Who holds a piece of a batch calls ``estimate_advantages``, or
    ``gae_advantages`` and then ``whiten_with`` by the moments of the whole batch. Raises ValueError
    if the mask selects fewer than two tokens.
    """
    advantages, returns = gae_advantages(token_level_rewards, values, response_mask, gamma, lam)
    return whitened(advantages, response_mask), returns


register_adv_stages("gae", raw=gae_advantages, scale=WHITENING)
