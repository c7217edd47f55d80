"""Advantages by recursion along a row's tokens, from the last to the first, over all rows at once.

The recursions run in float64 for every input dtype, because a rounding error of one token would
affect all tokens before it. Masked-out tokens, also within a row, are skipped. Results
(advantages, returns) are (B, R) in the dtype of the rewards, 0 off the mask.
"""

from __future__ import annotations

import torch

from ctrl_megatron.algorithms.groups import advantage_dtype
from ctrl_megatron.algorithms.masked import (
    Reduce,
    identity_reduce,
    masked_whiten,
    require_equal_shapes,
    zero_outside_mask,
)
from ctrl_megatron.algorithms.registry import register_adv_est


def discounted_sums(values: torch.Tensor, mask: torch.Tensor, discount: float) -> torch.Tensor:
    """S_t = x_t + ``discount`` * S of the row's next valid token, 0 after the last.

    ``values`` x and ``mask`` (B, R); gives (B, R) float64, 0 off the mask.
    """
    # Time first: a step reads contiguous memory.
    sums = zero_outside_mask(values, mask).double().t().contiguous()
    factors = torch.ones_like(sums).masked_fill_(mask.bool().t(), discount)
    for t in reversed(range(len(sums) - 1)):
        sums[t].addcmul_(factors[t], sums[t + 1])
    return zero_outside_mask(sums.t(), mask)


def next_token_values(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, R) float64: at t the value of the row's next valid token after t, 0 after the last."""
    on, own = (
        mask.bool().t().contiguous(),
        zero_outside_mask(values, mask).double().t().contiguous(),
    )
    found = torch.zeros_like(own)
    for t in reversed(range(len(own) - 1)):
        found[t] = torch.where(on[t + 1], own[t + 1], found[t + 1])
    return found.t()


@register_adv_est("gae")
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
    reduce: Reduce = identity_reduce,
    whiten: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation: (whitened advantages, returns).

    With the valid tokens of a row numbered 0, 1, ..., and V = 0 after the last:
    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t.
    ``whiten`` whitens the advantages over all tokens of the batch (``masked_whiten``); returns are
    as they are. Source: arXiv 1506.02438, equation 16. Raises ValueError for shapes that differ and
    if the mask selects fewer than two tokens to whiten.
    """
    require_equal_shapes(
        response_mask=response_mask, token_level_rewards=token_level_rewards, values=values
    )
    rewards, own = (
        zero_outside_mask(x, response_mask).double() for x in (token_level_rewards, values)
    )
    deltas = rewards + gamma * next_token_values(values, response_mask) - own
    sums = discounted_sums(deltas, response_mask, gamma * lam)
    dtype = advantage_dtype(token_level_rewards)
    advantages, returns = sums.to(dtype), (sums + own).to(dtype)
    if whiten:
        advantages = masked_whiten(advantages, response_mask, reduce=reduce)
    return advantages, returns


@register_adv_est("reinforce_plus_plus")
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    reduce: Reduce = identity_reduce,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(whitened returns, returns): G_t = r_t + gamma G_{t+1} over a row's valid tokens.

    Whitened over all tokens of the batch (``masked_whiten``). Source: arXiv 2501.03262. Raises
    ValueError for shapes that differ and if the mask selects fewer than two tokens.
    """
    require_equal_shapes(response_mask=response_mask, token_level_rewards=token_level_rewards)
    sums = discounted_sums(token_level_rewards, response_mask, gamma)
    returns = sums.to(advantage_dtype(token_level_rewards))
    return masked_whiten(returns, response_mask, reduce=reduce), returns


@register_adv_est("remax")
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: torch.Tensor, reward_baselines: torch.Tensor, response_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(reward-to-go - baseline of the row, reward-to-go).

    ``reward_baselines`` (B,): the score of the greedy response to the row's prompt. Source: ReMax,
    arXiv 2310.10505, algorithm 1. Raises ValueError for shapes that differ and if there is not one
    baseline per row.
    """
    require_equal_shapes(response_mask=response_mask, token_level_rewards=token_level_rewards)
    rows = len(response_mask)
    if reward_baselines.shape != (rows,):
        raise ValueError(
            f"reward_baselines has shape {tuple(reward_baselines.shape)}; remax needs the greedy "
            f"response's score of each row, ({rows},)"
        )
    sums = discounted_sums(token_level_rewards, response_mask, 1.0)
    less = zero_outside_mask(sums - reward_baselines.double().unsqueeze(-1), response_mask)
    dtype = advantage_dtype(token_level_rewards)
    return less.to(dtype), sums.to(dtype)
