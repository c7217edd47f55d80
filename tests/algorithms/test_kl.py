from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import normal, ragged_mask, seeds, spoil, tokens
from tensordict import TensorDict

from ctrl_megatron.algorithms import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    compute_grpo_outcome_advantage,
    get_kl_controller,
    kl_penalty,
    subtract_kl_penalty,
)

FORMULAS: dict[str, Callable[[float, float], float]] = {
    "kl": lambda p, q: p - q,
    "k1": lambda p, q: p - q,
    "abs": lambda p, q: abs(p - q),
    "mse": lambda p, q: (p - q) ** 2 / 2,
    "k2": lambda p, q: (p - q) ** 2 / 2,
    "low_var_kl": lambda p, q: min(math.exp(q - p) - (q - p) - 1, 10.0),
    "k3": lambda p, q: min(math.exp(q - p) - (q - p) - 1, 10.0),
}
PLAIN = sorted(FORMULAS)
FORMULAS |= {f"{name}+": FORMULAS[name] for name in PLAIN}
names = st.sampled_from(sorted(FORMULAS))


def log_prob_pair(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask(generator, 4, 5)
    log_prob = normal(generator, 4, 5) - 3.0
    return log_prob, log_prob + normal(generator, 4, 5, 1.5), mask


def test_every_estimator_has_a_formula_here() -> None:
    assert set(KL_ESTIMATORS) == set(FORMULAS)


@given(seeds, names)
def test_estimators_equal_plain_python(seed: int, name: str) -> None:
    log_prob, ref, _ = log_prob_pair(seed)
    want = [
        [FORMULAS[name](float(p), float(q)) for p, q in zip(*rows, strict=True)]
        for rows in zip(log_prob, ref, strict=True)
    ]
    got = kl_penalty(log_prob, ref, name)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-12)


@given(seeds, st.sampled_from(PLAIN))
def test_gradients_and_hidden_places(seed: int, name: str) -> None:
    log_prob, ref, mask = log_prob_pair(seed)
    gap = ref - log_prob
    # Away from the corners of abs (0) and of the bounded k3 (about 2.6).
    log_prob = torch.where((gap.abs() < 0.01) | ((gap - 2.6).abs() < 0.1), ref + 0.3, log_prob)
    log_prob.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ref, name, mask), (log_prob,))
    kl_penalty(log_prob, ref, name, mask).sum().backward()
    dirty = spoil(log_prob.detach(), mask).requires_grad_()
    estimate = kl_penalty(dirty, spoil(ref, mask), name, mask)
    estimate.sum().backward()
    assert dirty.grad is not None
    torch.testing.assert_close(dirty.grad, log_prob.grad, rtol=0, atol=0)
    assert torch.all(estimate[~mask] == 0)


@given(seeds, st.sampled_from(PLAIN))
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(seed: int, name: str) -> None:
    log_prob, ref, mask = log_prob_pair(seed)
    dirty = spoil(log_prob, mask).requires_grad_()
    estimate = kl_penalty(dirty, spoil(ref, mask), f"{name}+", mask)
    torch.testing.assert_close(estimate, kl_penalty(log_prob, ref, name, mask))
    weights = normal(torch.Generator().manual_seed(seed), 4, 5)
    (estimate * weights).sum().backward()
    # d/dx (x - q)^2 / 2
    want = torch.where(mask, weights * (log_prob - ref), 0.0)
    torch.testing.assert_close(dirty.grad, want, rtol=1e-9, atol=1e-12)


def test_k3_is_bounded_with_a_finite_gradient() -> None:
    log_prob = torch.tensor([-1000.0, 0.0, -1.0], requires_grad=True)
    estimate = kl_penalty(log_prob, torch.tensor([0.0, -1000.0, -1.0]), "k3")
    estimate.sum().backward()
    assert estimate.tolist() == [10.0, 10.0, 0.0]
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [0.0, 0.0, 0.0]


def test_unknown_estimator_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown kl_penalty 'k4'; known: kl, k1, abs, mse"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


def reward_batch(seed: int) -> dict[str, torch.Tensor]:
    old, ref, mask = log_prob_pair(seed)
    scores = normal(torch.Generator().manual_seed(seed + 1), 4, 5)
    return {
        "token_level_scores": scores,
        "old_log_probs": old,
        "ref_log_prob": ref,
        "response_mask": mask,
    }


@given(seeds, names)
def test_penalty_in_the_reward_equals_plain_python(seed: int, name: str) -> None:
    data = reward_batch(seed)
    mask, scores = data["response_mask"], data["token_level_scores"]
    want, kls = scores.clone(), []
    for i in range(4):
        for t in tokens(mask, i):
            kls.append(
                FORMULAS[name](
                    float(data["old_log_probs"][i, t]), float(data["ref_log_prob"][i, t])
                )
            )
            want[i, t] -= 0.05 * kls[-1]
    data["ref_log_prob"] = spoil(data["ref_log_prob"], mask)
    before = scores.clone()
    back, metrics = apply_kl_penalty(data, FixedKLController(0.05), kl_penalty=name)
    assert back is data
    torch.testing.assert_close(data["token_level_rewards"], want, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(scores, before, rtol=0, atol=0)
    assert metrics == {
        "actor/reward_kl_penalty": pytest.approx(sum(kls) / len(kls), rel=1e-6, abs=1e-12),
        "actor/kl_coef": 0.05,
    }


def test_a_tensordict_works_and_the_controller_moves_after_use() -> None:
    data = TensorDict(reward_batch(7), batch_size=[4])
    control = AdaptiveKLController(0.1, target_kl=1e-3, horizon=100)
    back, metrics = apply_kl_penalty(data, control, "abs")
    assert back is data
    assert metrics["actor/kl_coef"] == 0.1
    assert control.value == pytest.approx(0.1 * (1 + 0.2 * 4 / 100))
    rewards, kl = subtract_kl_penalty(
        data["token_level_scores"],
        data["old_log_probs"],
        data["ref_log_prob"],
        data["response_mask"],
        beta=0.1,
        kl_penalty="abs",
    )
    torch.testing.assert_close(data["token_level_rewards"], rewards)
    assert torch.all(kl[~data["response_mask"]] == 0)


def test_no_token_is_an_error() -> None:
    data = reward_batch(9)
    data["response_mask"] = torch.zeros_like(data["response_mask"])
    with pytest.raises(ValueError, match="selects no element"):
        apply_kl_penalty(data, FixedKLController(0.1))


def test_kl_in_the_reward_changes_the_group_statistics() -> None:
    data = {
        "token_level_scores": torch.tensor([[0.0, 1.0], [0.0, 1.0]]),
        "old_log_probs": torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]),
        "ref_log_prob": torch.tensor([[-1.0, -1.0], [-2.0, -2.0]]),
        "response_mask": torch.ones(2, 2),
    }
    data, _ = apply_kl_penalty(data, FixedKLController(0.5))
    advantages, _ = compute_grpo_outcome_advantage(
        data["token_level_rewards"], data["response_mask"], ["g", "g"]
    )
    # Scores 1 and 1 - 0.5 * 2 = 0: mean 0.5, unbiased std sqrt(0.5).
    size = 0.5 / (math.sqrt(0.5) + 1e-6)
    torch.testing.assert_close(advantages, torch.tensor([[size, size], [-size, -size]]))


@given(st.floats(1e-4, 1.0), st.floats(1e-3, 1.0), st.lists(st.floats(-0.5, 2.0), max_size=6))
def test_adaptive_controller_follows_its_formula_and_survives_a_restart(
    start: float, target: float, kls: list[float]
) -> None:
    control, value = AdaptiveKLController(start, target, horizon=1000), start
    for kl in kls:
        resumed = AdaptiveKLController(9.0, target, horizon=1000)
        resumed.load_state_dict(control.state_dict())
        control = resumed
        control.update(current_kl=kl, n_steps=64)
        value *= 1 + max(-0.2, min(0.2, kl / target - 1)) * 64 / 1000
        assert control.value == pytest.approx(value, rel=1e-12)


def test_controllers_refuse_what_would_ruin_them() -> None:
    control = AdaptiveKLController(0.1, 0.01, 100)
    with pytest.raises(ValueError, match="current_kl=nan is not finite"):
        control.update(float("nan"), 1)
    with pytest.raises(ValueError, match=r"horizon=100 is too short .* larger than 102\.4"):
        control.update(0.0, 512)
    assert control.value == 0.1
    for wrong in ((0.1, 0.0, 10), (0.1, 0.1, 0), (-0.1, 0.1, 10), (float("nan"), 0.1, 10)):
        with pytest.raises(ValueError):
            AdaptiveKLController(*wrong)
    with pytest.raises(ValueError, match="kl_coef"):
        FixedKLController(-1.0)


def test_fixed_controller_stays_at_the_configured_value() -> None:
    control = FixedKLController(0.2)
    control.update(current_kl=100.0, n_steps=5)
    assert control.value == 0.2
    resumed = FixedKLController(0.9)
    # The second is what older checkpoints hold.
    for state in (control.state_dict(), {"type": "fixed", "value": 0.2}):
        resumed.load_state_dict(state)
        assert resumed.value == 0.9
    with pytest.raises(ValueError, match="resume with the same"):
        resumed.load_state_dict(AdaptiveKLController(0.1, 0.1, 10).state_dict())
    with pytest.raises(ValueError, match="holds a 'fixed' KL controller"):
        AdaptiveKLController(0.1, 0.1, 10).load_state_dict(control.state_dict())


def test_controllers_by_name() -> None:
    assert isinstance(get_kl_controller("fixed", 0.1), FixedKLController)
    adaptive = get_kl_controller("adaptive", 0.1, target_kl=0.05, horizon=7)
    assert isinstance(adaptive, AdaptiveKLController)
    assert (adaptive.value, adaptive.target, adaptive.horizon) == (0.1, 0.05, 7)
    with pytest.raises(ValueError, match=r"unknown kl_ctrl\.type 'pid'; known: fixed, adaptive"):
        get_kl_controller("pid", 0.1)
    with pytest.raises(ValueError, match=r"needs kl_ctrl\.target_kl and kl_ctrl\.horizon"):
        get_kl_controller("adaptive", 0.1)
