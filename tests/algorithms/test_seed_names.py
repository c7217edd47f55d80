"""The argument names that scripts written against the public documents use."""

from __future__ import annotations

import inspect
import uuid
from types import SimpleNamespace

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron import algorithms
from ctrl_megatron.algorithms import (
    AdaptiveKLController,
    agg_loss,
    apply_kl_penalty,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_policy_loss,
    compute_policy_loss_cpgd,
    compute_policy_loss_gpg,
    compute_policy_loss_gspo,
    compute_policy_loss_vanilla,
    compute_value_loss,
    kl_penalty,
)

ONES = torch.ones(2, 3)


def test_every_argument_may_be_given_by_its_documented_name() -> None:
    config = SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, clip_ratio_c=3.0
    )
    for loss in (
        *(compute_policy_loss_vanilla, compute_policy_loss_gspo),
        *(compute_policy_loss_cpgd, compute_policy_loss_gpg),
    ):
        loss(
            old_log_prob=ONES,
            log_prob=ONES,
            advantages=ONES,
            response_mask=ONES,
            loss_agg_mode="token-mean",
            config=config,
            rollout_is_weights=None,
        )
    compute_policy_loss(
        old_log_prob=ONES, log_prob=ONES, advantages=ONES, response_mask=ONES, cliprange=0.2
    )
    compute_value_loss(
        vpreds=ONES,
        returns=ONES,
        values=ONES,
        response_mask=ONES,
        cliprange_value=0.5,
        loss_agg_mode="token-mean",
    )
    compute_grpo_outcome_advantage(
        token_level_rewards=ONES,
        response_mask=ONES,
        index=np.array([0, 0]),
        epsilon=1e-6,
        norm_adv_by_std_in_grpo=True,
    )
    compute_gae_advantage_return(
        token_level_rewards=ONES, values=ONES, response_mask=ONES, gamma=1.0, lam=1.0
    )
    agg_loss(loss_mat=ONES, loss_mask=ONES, loss_agg_mode="token-mean")
    estimate = kl_penalty(logprob=ONES, ref_logprob=2 * ONES, kl_penalty="abs")
    assert torch.equal(estimate, ONES)


def test_the_clipped_loss_with_its_options_as_arguments() -> None:
    generator = torch.Generator().manual_seed(1)
    old, new, gain = (torch.randn(4, 5, generator=generator) for _ in range(3))
    config = SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.3, clip_ratio_c=1.5
    )
    mask = torch.arange(5) < torch.tensor([[5], [3], [0], [1]])
    want = compute_policy_loss_vanilla(old, new, gain, mask, "seq-mean-token-mean", config)
    got = compute_policy_loss(old, new, gain, mask, 0.2, None, 0.3, 1.5, "seq-mean-token-mean")
    assert [float(x) for x in got] == [float(x) for x in want]


def test_the_kl_estimator_is_a_function_and_an_argument() -> None:
    assert callable(kl_penalty)
    assert inspect.signature(apply_kl_penalty).parameters["kl_penalty"].default == "kl"
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=0.5, horizon=100)
    data = TensorDict(
        {
            "token_level_scores": torch.zeros(2, 3),
            "old_log_probs": ONES,
            "ref_log_prob": -ONES,
            "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
        },
        batch_size=[2],
    )
    back, metrics = apply_kl_penalty(data=data, kl_ctrl=controller, kl_penalty="mse")
    # (1 - -1)^2 / 2 = 2 per token, four times the target: the error is cut at 0.2.
    assert metrics == {"actor/reward_kl_penalty": 2.0, "actor/kl_coef": 0.1}
    want = torch.tensor([[-0.2, -0.2, 0.0], [-0.2, 0.0, 0.0]])
    torch.testing.assert_close(back["token_level_rewards"], want)
    controller_value = 0.1 * (1 + 0.2 * 2 / 100)
    assert abs(controller.value - controller_value) < 1e-12
    assert (controller.target, controller.horizon) == (0.5, 100)


def test_ids_as_a_batch_holds_them_are_group_ids() -> None:
    names = [uuid.UUID(int=i % 2).hex for i in range(4)]
    batch = TensorDict({"rewards": torch.tensor([[1.0], [2.0], [3.0], [6.0]])}, batch_size=[4])
    batch["uid"] = NonTensorStack(*names)
    want, _ = compute_grpo_outcome_advantage(batch["rewards"], torch.ones(4, 1), [0, 1, 0, 1])
    for ids in (batch["uid"], batch.get("uid"), np.array(names)):
        got, _ = compute_grpo_outcome_advantage(batch["rewards"], torch.ones(4, 1), ids)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_everything_promised_is_exported() -> None:
    for name in algorithms.__all__:
        assert hasattr(algorithms, name)
