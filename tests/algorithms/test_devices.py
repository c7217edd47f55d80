"""Meta tensors refuse to meet CPU tensors and to be read: what runs on them runs on any device
without copying tensors to the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ctrl_megatron.algorithms import (
    KL_ESTIMATORS,
    LOSS_AGG_MODES,
    agg_loss,
    compute_grpo_outcome_advantage,
    compute_policy_loss_vanilla,
    gae_advantages,
    kl_penalty,
    penalise,
)

DEVICES = ["meta", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_everything_stays_on_its_device(device: str) -> None:
    a, mask = torch.rand(4, 3, device=device), torch.ones(4, 3, device=device)
    config = SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.3, clip_ratio_c=3.0
    )
    found = [
        *compute_grpo_outcome_advantage(a, mask, ["x", "x", "y", "y"]),
        *gae_advantages(a, a, mask, 1.0, 0.9),
        *compute_policy_loss_vanilla(a, a, a, mask, config=config, rollout_is_weights=a),
        *penalise(a, a, a, mask, beta=0.1),
        *(kl_penalty(a, a, name, mask) for name in KL_ESTIMATORS),
        *(agg_loss(a, mask, mode) for mode in LOSS_AGG_MODES),
    ]
    assert {x.device.type for x in found} == {device}
