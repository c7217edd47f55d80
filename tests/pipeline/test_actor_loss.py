from __future__ import annotations

import pytest
import torch

from ctrl_megatron.algorithms import POLICY_LOSS_REGISTRY, register_policy_loss
from ctrl_megatron.config.actor import Actor
from ctrl_megatron.pipeline.actor_update import ActorLoss


def test_a_loss_of_a_whole_batch_is_told_how_to_become_trainable() -> None:
    register_policy_loss("test_my_custom_loss")(lambda *_args, **_options: (torch.zeros(()),) * 4)
    try:
        with pytest.raises(ValueError, match=r"'test_my_custom_loss' .* register_policy_loss_term"):
            ActorLoss(Actor(policy_loss="test_my_custom_loss"), with_kl=False)
    finally:
        del POLICY_LOSS_REGISTRY._entries["test_my_custom_loss"]
    with pytest.raises(ValueError, match=r"unknown policy loss .* known: cispo, clip_cov, "):
        ActorLoss(Actor(policy_loss="test_my_custom_loss"), with_kl=False)
