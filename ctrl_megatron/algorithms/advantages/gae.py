"""Generalised advantage estimation."""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.advantages.groups import floating_dtype
from ctrl_megatron.algorithms.advantages.recursions import discounted_sums, next_values
from ctrl_megatron.algorithms.advantages.registry import register_adv_est
from ctrl_megatron.algorithms.masked import (
    Reduce,
    check_shapes,
    masked,
    masked_whiten,
    nothing_to_add,
)


@register_adv_est("gae")
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
    reduce: Reduce = nothing_to_add,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(whitened advantages, returns), (B, R) each in the rewards' dtype, 0 off the mask.

    With the valid tokens of a row numbered 0, 1, ..., and V = 0 after the last:
    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t.
    The advantages are whitened over all tokens of the batch (``masked_whiten``), returns are not.
    Source: arXiv 1506.02438, equation 16. Raises ValueError for shapes that differ and if the mask
    selects fewer than two tokens.
    """
    check_shapes(
        response_mask=response_mask, token_level_rewards=token_level_rewards, values=values
    )
    rewards, own = (masked(x, response_mask).double() for x in (token_level_rewards, values))
    deltas = rewards + gamma * next_values(values, response_mask) - own
    sums = discounted_sums(deltas, response_mask, gamma * lam)
    dtype = floating_dtype(token_level_rewards)
    advantages, returns = sums.to(dtype), (sums + own).to(dtype)
    return masked_whiten(advantages, response_mask, reduce=reduce), returns
