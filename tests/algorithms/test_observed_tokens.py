"""Tokens that a model only read between its own change nothing: every formula gives what it gives
for the rows without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ctrl_megatron.algorithms import (
    ADV_ESTIMATOR_REGISTRY,
    LOSS_AGG_MODES,
    POLICY_LOSS_REGISTRY,
    compute_rollout_correction,
    estimate_advantages,
    kl_penalty,
    rollout_mismatch_sums,
    subtract_kl_penalty,
    value_loss_terms,
)
from ctrl_megatron.algorithms.core_algos import compute_policy_loss
from ctrl_megatron.config import Actor
from ctrl_megatron.models.loss_scale import GlobalCounts
from ctrl_megatron.steps.losses import ActorLoss

ROWS, WIDTH = 6, 11


def mask_of() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(ROWS, WIDTH, generator=generator) > 0.4
    mask[:, 4] = True
    mask[5] = False
    return mask


MASK = mask_of()


def noise(seed: int) -> torch.Tensor:
    """(ROWS, WIDTH) float64, also where the mask is off: what is there must not count."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def without(values: torch.Tensor) -> torch.Tensor:
    """The masked tokens of every row, moved to its beginning."""
    packed = torch.zeros_like(values)
    for row in range(ROWS):
        own = values[row, MASK[row]]
        packed[row, : len(own)] = own
    return packed


def same(compute: Callable[..., Any], *fields: torch.Tensor) -> None:
    """``compute`` gets the mask and the fields, and returns tensors by token or by batch."""
    whole, packed = compute(MASK, *fields), compute(without(MASK), *map(without, fields))
    whole, packed = (x if isinstance(x, tuple) else (x,) for x in (whole, packed))
    for one, other in zip(whole, packed, strict=True):
        by_token = getattr(one, "shape", None) == MASK.shape
        one, other = (without(one), other * without(MASK)) if by_token else (one, other)
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", list(ADV_ESTIMATOR_REGISTRY))
def test_advantages(name: str) -> None:
    rewards = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    rewards[torch.arange(ROWS), MASK.cumsum(1).argmax(1)] = noise(1)[:, 0]

    def compute(mask: torch.Tensor, rewards: torch.Tensor, values: torch.Tensor) -> Any:
        offered: dict[str, Any] = {
            "token_level_rewards": rewards * mask,
            "response_mask": mask,
            "index": ["a", "a", "a", "b", "b", "b"],
            "gamma": 0.9,
            "lam": 0.8,
            "values": values,
            "reward_baselines": noise(3)[:, 0],
            "reward_parts": noise(4)[:, :2],
            "reward_weights": torch.ones(2),
        }
        return estimate_advantages(name, offered)

    same(compute, rewards, noise(2))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", list(POLICY_LOSS_REGISTRY))
def test_losses_and_their_gradients(name: str, mode: str) -> None:
    actor = Actor(
        policy_loss=name, loss_agg_mode=mode, use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.1
    )
    loss = ActorLoss(actor, response_limit=WIDTH)
    tokens, rows = int(MASK.sum()), int(MASK.any(1).sum())

    def compute(mask: torch.Tensor, new: torch.Tensor, *others: torch.Tensor) -> Any:
        log_probs = new.clone().requires_grad_()
        old, gains, weights, reference, entropy, lots = others
        given = {
            "response_mask": mask,
            "old_log_probs": old,
            "advantages": gains,
            "rollout_is_weights": weights.abs(),
            "ref_log_prob": reference,
            "selected": (lots > 0) & mask,
        }
        counts = GlobalCounts(tokens=tokens, sequences=rows)
        found, scalars = loss(log_probs, entropy.abs(), given, counts)
        found.backward()
        assert log_probs.grad is not None
        return found.detach(), *scalars.values(), log_probs.grad

    same(compute, *(0.3 * noise(seed) for seed in range(7)))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rollout_correction_and_its_metrics(level: str) -> None:
    def compute(mask: torch.Tensor, old: torch.Tensor, rollout: torch.Tensor) -> Any:
        keys: dict[str, Any] = {"rollout_is": level, "rollout_rs": level}
        correction = compute_rollout_correction(old, rollout, mask, **keys)
        assert correction.weights is not None
        sums = rollout_mismatch_sums(old, rollout, mask, correction, 2.0)
        return correction.weights, correction.response_mask, sums.sums, sums.largest

    same(compute, -noise(1).abs(), -noise(2).abs())


def test_kl_in_the_reward_and_values() -> None:
    def rewards(mask: torch.Tensor, scores: torch.Tensor, *log_probs: torch.Tensor) -> Any:
        return subtract_kl_penalty(scores * mask, *log_probs, mask, beta=0.1, kl_penalty="kl")

    def values(mask: torch.Tensor, *given: torch.Tensor) -> Any:
        terms = value_loss_terms(*given, mask, 0.2)
        return terms.loss * mask, terms.clipped * mask

    def gaps(mask: torch.Tensor, *log_probs: torch.Tensor) -> Any:
        return kl_penalty(*log_probs, "low_var_kl", mask)

    same(rewards, noise(1), noise(2), noise(3))
    same(values, noise(1), noise(2), noise(3))
    same(gaps, noise(1), noise(2))


def test_the_definition_itself() -> None:
    """The clipped loss of PPO over the masked tokens, in plain Python."""
    new, old, gains = 0.3 * noise(1), 0.3 * noise(2), noise(3)
    total = 0.0
    for row in range(ROWS):
        for column in range(WIDTH):
            if MASK[row, column]:
                ratio = float((new - old)[row, column].exp())
                gain = float(gains[row, column])
                total += max(-gain * ratio, -gain * min(max(ratio, 0.8), 1.2))
    found = compute_policy_loss(old, new, gains, MASK, cliprange=0.2, clip_ratio_c=1e9)
    assert float(found[0]) == pytest.approx(total / int(MASK.sum()), rel=1e-12)
