"""Meta tensors refuse to meet CPU tensors and to be read: what runs on them runs on any device
without copying tensors to the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ctrl_megatron.algorithms import (
    ADV_ESTIMATOR_REGISTRY,
    KL_ESTIMATORS,
    LOSS_AGG_MODES,
    POLICY_LOSS_REGISTRY,
    agg_loss,
    compute_rollout_correction,
    compute_value_loss,
    estimate_advantages,
    explained_variance_sums,
    get_policy_loss,
    kl_penalty,
    log_prob_and_advantage_sums,
    rollout_mismatch_sums,
    subtract_kl_penalty,
)
from ctrl_megatron.algorithms.covariance import token_covariances

DEVICES = ["meta", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_everything_stays_on_its_device(device: str) -> None:
    a, mask = torch.rand(4, 3, device=device), torch.ones(4, 3, device=device)
    found = [
        *subtract_kl_penalty(a, a, a, mask, beta=0.1),
        *(kl_penalty(a, a, name, mask) for name in KL_ESTIMATORS),
        *(agg_loss(a, mask, mode) for mode in LOSS_AGG_MODES),
        *compute_value_loss(a, a, a, mask, 0.2),
        explained_variance_sums(a, a, mask),
        token_covariances(a, a, mask, log_prob_and_advantage_sums(a, a, mask)),
        *rollout_mismatch_sums(
            a, a, mask, compute_rollout_correction(a, a, mask, rollout_is="token"), 2.0
        ),
        compute_rollout_correction(a, a, mask, rollout_rs="geometric").response_mask,
    ]
    assert {x.device.type for x in found} == {device}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(ADV_ESTIMATOR_REGISTRY))
def test_estimators_stay_on_their_device(name: str, device: str) -> None:
    a, mask = torch.rand(4, 3, device=device), torch.ones(4, 3, device=device)
    given = {
        **{"token_level_rewards": a, "response_mask": mask, "values": a},
        **{"index": ["x", "x", "y", "y"], "reward_baselines": a[:, 0], "gamma": 1.0, "lam": 0.9},
        **{"reward_parts": a, "reward_weights": torch.ones(3)},
    }
    # Whitening reads the count, to refuse fewer than two tokens.
    sums: list[torch.Tensor] = []
    found = estimate_advantages(
        name, given, lambda own: sums.append(own) or torch.tensor([5.0, 2.0, 8.0][: len(own)])
    )
    assert {x.device.type for x in (*found, *sums)} == {device}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(POLICY_LOSS_REGISTRY))
def test_losses_stay_on_their_device(name: str, device: str) -> None:
    a, mask = torch.rand(4, 3, device=device), torch.ones(4, 3, device=device)
    config = SimpleNamespace(
        **{"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0},
        ppo_kl_coef=1.0,
    )
    chosen = {"selected": mask.bool()} if POLICY_LOSS_REGISTRY.get(name).selection else {}
    loss = get_policy_loss(name)
    found = loss(a, a, a, mask, config=config, rollout_is_weights=a, **chosen)
    assert {x.device.type for x in found} == {device}
