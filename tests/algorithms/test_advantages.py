from __future__ import annotations

import math
import uuid
from enum import Enum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import normal, ragged_mask, seeds, spoil, tokens

from ctrl_megatron.algorithms import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    get_adv_estimator,
    register_adv_est,
)
from ctrl_megatron.algorithms.groups import group_number_of_rows
from ctrl_megatron.algorithms.masked import masked_moment_sums


def random_groups(generator: torch.Generator, rows: int) -> list[str]:
    names = [str(uuid.UUID(int=i)) for i in range(3)]
    return [names[i] for i in torch.randint(0, 3, (rows,), generator=generator).tolist()]


def grpo_oracle(
    rewards: torch.Tensor, mask: torch.Tensor, index: list, epsilon: float, by_std: bool
) -> list[list[float]]:
    rows, width = mask.shape
    score = {i: sum(float(rewards[i, t]) for t in tokens(mask, i)) for i in range(rows)}
    result = [[0.0] * width for _ in range(rows)]
    for i in range(rows):
        mates = [score[j] for j in range(rows) if index[j] == index[i] and mask[j].any()]
        if len(mates) < 2:
            continue
        mean = sum(mates) / len(mates)
        advantage = score[i] - mean
        if by_std:
            std = math.sqrt(sum((m - mean) ** 2 for m in mates) / (len(mates) - 1))
            advantage /= std + epsilon
        for t in tokens(mask, i):
            result[i][t] = advantage
    return result


@given(seeds, st.booleans(), st.sampled_from([1e-6, 1e-2]))
def test_grpo_equals_plain_python(seed: int, by_std: bool, epsilon: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask, rewards = ragged_mask(generator, 8, 5), normal(generator, 8, 5)
    index = random_groups(generator, 8)
    dirty = spoil(rewards, mask)
    before = dirty.clone()
    advantages, returns = compute_grpo_outcome_advantage(
        dirty, mask, np.array(index, dtype=object), epsilon, by_std
    )
    expected = torch.tensor(grpo_oracle(rewards, mask, index, epsilon, by_std), dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(returns, advantages, rtol=0, atol=0)
    torch.testing.assert_close(dirty, before, rtol=0, atol=0, equal_nan=True)


@given(seeds)
def test_grpo_ignores_shifts_of_a_group_and_the_order_of_rows(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask, rewards = ragged_mask(generator, 9, 4), normal(generator, 9, 4)
    mask[:, 0] = True
    index = ["a"] * 4 + ["b"] * 5
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, index)
    shifted = rewards.clone()
    shifted[:4, 0] += 3.0
    moved, _ = compute_grpo_outcome_advantage(shifted, mask, index)
    torch.testing.assert_close(moved, advantages, rtol=1e-6, atol=1e-7)
    order = torch.randperm(9, generator=generator)
    permuted, _ = compute_grpo_outcome_advantage(
        rewards[order], mask[order], [index[i] for i in order.tolist()]
    )
    torch.testing.assert_close(permuted, advantages[order], rtol=1e-9, atol=1e-12)
    for rows in (slice(0, 4), slice(4, 9)):
        assert abs(float(advantages[rows, 0].sum())) < 1e-9
    wider, _ = compute_grpo_outcome_advantage(
        torch.nn.functional.pad(rewards, (0, 3), value=float("nan")),
        torch.nn.functional.pad(mask, (0, 3)),
        index,
    )
    torch.testing.assert_close(wider[:, :4], advantages, rtol=0, atol=0)


def test_grpo_takes_any_kind_of_group_id() -> None:
    rewards, mask = torch.tensor([[1.0], [3.0], [5.0], [9.0]]), torch.ones(4, 1)
    want, _ = compute_grpo_outcome_advantage(rewards, mask, [0, 0, 1, 1])
    kinds = (
        ["x", "x", "y", "y"],
        [("p", 1), ("p", 1), ("q", 1), ("q", 1)],
        torch.tensor([7, 7, -1, -1]),
        [torch.tensor(7), torch.tensor(7), torch.tensor(2), torch.tensor(2)],
        np.array([7, 7, 2, 2]),
        np.array([uuid.UUID(int=1)] * 2 + [uuid.UUID(int=2)] * 2, dtype=object),
    )
    for index in kinds:
        got, _ = compute_grpo_outcome_advantage(rewards, mask, index)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert group_number_of_rows(["b", "a", "b"], 3).tolist() == [0, 1, 0]


@pytest.mark.parametrize("count", [2, 7, 8])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
def test_equal_float32_rewards_give_exactly_no_advantage(reward: float, count: int) -> None:
    rewards = torch.full((count, 1), reward)
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(count, 1), ["g"] * count)
    assert advantages.dtype == torch.float32
    assert torch.equal(advantages, torch.zeros(count, 1))


def test_a_row_without_tokens_is_not_a_member_of_its_group() -> None:
    rewards = torch.tensor([[1.0], [3.0], [100.0]])
    mask = torch.tensor([[True], [True], [False]])
    with_it, _ = compute_grpo_outcome_advantage(rewards, mask, ["g"] * 3)
    without, _ = compute_grpo_outcome_advantage(rewards[:2], mask[:2], ["g"] * 2)
    torch.testing.assert_close(with_it[:2], without)
    assert with_it[2].tolist() == [0.0]


def test_grpo_of_an_empty_batch_is_empty() -> None:
    advantages, _ = compute_grpo_outcome_advantage(torch.zeros(0, 3), torch.zeros(0, 3), [])
    assert advantages.shape == (0, 3)


def test_wrong_group_ids_are_named() -> None:
    rewards = torch.ones(2, 1)
    with pytest.raises(ValueError, match="3 group ids for 2 rows"):
        compute_grpo_outcome_advantage(rewards, rewards, ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"row 1 .*unhashable"):
        compute_grpo_outcome_advantage(rewards, rewards, ["a", ["b"]])  # type: ignore[list-item]


def gae_oracle(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A_t as the explicit sum of (gamma lam)^k delta_{t+k} over the row's valid tokens."""
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    returns = torch.zeros(mask.shape, dtype=torch.float64)
    for i in range(mask.shape[0]):
        places = list(tokens(mask, i))
        v = [float(values[i, t]) for t in places] + [0.0]
        deltas = [float(rewards[i, t]) + gamma * v[k + 1] - v[k] for k, t in enumerate(places)]
        for k, t in enumerate(places):
            total = sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(places)))
            advantages[i, t], returns[i, t] = total, total + v[k]
    return advantages, returns


@given(seeds, st.sampled_from([(1.0, 1.0), (0.99, 0.95), (0.5, 0.0)]))
def test_gae_equals_plain_python(seed: int, discount: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask(generator, 4, 6)
    rewards, values = normal(generator, 4, 6), normal(generator, 4, 6)
    want, want_returns = gae_oracle(rewards, values, mask, *discount)
    dirty = spoil(rewards, mask), spoil(values, mask), mask.float()
    advantages, returns = compute_gae_advantage_return(*dirty, *discount, whiten=False)
    torch.testing.assert_close(advantages, want, rtol=1e-6, atol=1e-9)
    assert torch.all(advantages[~mask] == 0)
    torch.testing.assert_close(returns, want_returns, rtol=1e-6, atol=1e-9)
    whitened, returns = compute_gae_advantage_return(*dirty, *discount)
    torch.testing.assert_close(returns, want_returns, rtol=1e-6, atol=1e-9)
    chosen = want[mask]
    torch.testing.assert_close(
        whitened[mask],
        (chosen - chosen.mean()) / (chosen.var() + 1e-8).sqrt(),
        rtol=1e-6,
        atol=1e-9,
    )
    assert torch.all(whitened[~mask] == 0)
    assert torch.all(returns[~mask] == 0)


def test_gae_of_pieces_with_the_moments_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(5)
    mask = ragged_mask(generator, 6, 5)
    rewards, values = normal(generator, 6, 5), normal(generator, 6, 5)
    whole, _ = compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8)
    raw, _ = compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8, whiten=False)
    total = masked_moment_sums(raw, mask)
    parts = [
        compute_gae_advantage_return(rewards[s], values[s], mask[s], 0.9, 0.8, lambda _: total)[0]
        for s in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_registry_names_what_it_knows_and_keeps_what_it_has() -> None:
    assert get_adv_estimator("grpo") is compute_grpo_outcome_advantage
    assert get_adv_estimator("gae") is compute_gae_advantage_return
    with pytest.raises(
        ValueError,
        match=r"unknown advantage estimator 'grop'; did you mean 'grpo'\? known: cpgd, gae, gdpo, ",
    ):
        get_adv_estimator("grop")
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        register_adv_est("grpo")(compute_gae_advantage_return)

    class Name(Enum):
        GAE = "gae"

    assert get_adv_estimator(Name.GAE) is compute_gae_advantage_return
    assert register_adv_est(Name.GAE)(compute_gae_advantage_return) is compute_gae_advantage_return
