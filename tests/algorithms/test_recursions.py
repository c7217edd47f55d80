"""Recursions over long rows: their errors must not grow with the number of tokens."""

from __future__ import annotations

import pytest
import torch
from ragged_batches import leaves_as_it_is, ragged_mask

from ctrl_megatron.algorithms import (
    compute_gae_advantage_return,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
)

ROWS, WIDTH = 5, 2048
GAMMA, LAM = 0.999, 0.99
Pair = tuple[torch.Tensor, torch.Tensor]
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rewards, values, mask): a penalty on every token and a score on the last."""
    generator = torch.Generator().manual_seed(3)
    mask = ragged_mask(generator, ROWS, WIDTH)
    rewards = torch.full((ROWS, WIDTH), -1e-3, dtype=torch.float64)
    rewards += 1e-4 * torch.randn(rewards.shape, generator=generator, dtype=torch.float64)
    rewards[:, -1] += 1.0
    mask[:, -1] = True
    values = torch.randn(rewards.shape, generator=generator, dtype=torch.float64)
    return rewards.to(dtype), values.to(dtype), mask


def oracle(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> Pair:
    """(advantages, returns) token by token, in Python's numbers."""
    advantages, returns = (torch.zeros(mask.shape, dtype=torch.float64) for _ in range(2))
    for i, (row, own, on) in enumerate(zip(rewards.tolist(), values.tolist(), mask, strict=True)):
        running = value = 0.0
        for t in reversed(on.nonzero().squeeze(-1).tolist()):
            running = row[t] + gamma * value - own[t] + gamma * lam * running
            value = own[t]
            advantages[i, t], returns[i, t] = running, running + value
    return advantages, returns


def close(found: Pair, want: Pair, dtype: torch.dtype) -> None:
    """One rounding to the dtype and no more."""
    for got, exact in zip(found, want, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(
            got.double(), exact, rtol=torch.finfo(dtype).eps / 1.99, atol=1e-12
        )


@dtypes
def test_long_rows_are_rounded_once(dtype: torch.dtype) -> None:
    rewards, values, mask = inputs(dtype)
    nothing = torch.zeros_like(values)
    close(
        compute_gae_advantage_return(rewards, values, mask, GAMMA, LAM, leaves_as_it_is),
        oracle(rewards, values, mask, GAMMA, LAM),
        dtype,
    )
    sums, _ = oracle(rewards, nothing, mask, GAMMA, 1.0)
    found = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, GAMMA, leaves_as_it_is)
    close(found, (sums, sums), dtype)
    sums, _ = oracle(rewards, nothing, mask, 1.0, 1.0)
    baselines = torch.linspace(-1.0, 1.0, ROWS).to(dtype)
    less = torch.where(mask, sums - baselines.double()[:, None], 0.0)
    found = compute_remax_outcome_advantage(rewards, baselines, mask)
    close(found, (less, sums), dtype)


def test_a_small_penalty_per_token_adds_up_in_bfloat16() -> None:
    rewards = torch.full((1, WIDTH), -1e-3, dtype=torch.bfloat16)
    rewards[0, -1] = 1.0
    _, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, torch.ones(1, WIDTH), 1.0)
    # 1 - 2047 * 0.00099945: the penalty as bfloat16 knows it.
    assert float(returns[0, 0]) == pytest.approx(1 - 2047 * float(rewards[0, 0]) * -1, rel=4e-3)
    assert float(returns[0, 0]) < -1


def test_the_rewards_decide_the_dtype() -> None:
    rewards, values, mask = inputs(torch.float32)
    found = compute_gae_advantage_return(rewards.bfloat16(), values, mask, GAMMA, LAM)
    assert [x.dtype for x in found] == [torch.bfloat16] * 2
    found = compute_gae_advantage_return(torch.ones_like(mask).long(), values, mask, GAMMA, LAM)
    assert [x.dtype for x in found] == [torch.float32] * 2
