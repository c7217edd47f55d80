"""What the optimizers minimise, against formulas in plain Python: every term with its sign and its
share of the mini-batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
import torch

from ctrl_megatron.algorithms import (
    LOSS_AGG_MODES,
    POLICY_LOSS_REGISTRY,
    PolicyLossTerms,
    register_policy_loss,
    register_policy_loss_terms,
    registry,
)
from ctrl_megatron.config import Actor
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.loss_scale import GlobalCounts
from ctrl_megatron.pipeline.losses import ActorLoss, ValueLoss

ROWS, WIDTH, LIMIT = 4, 5, 17
# More than the rows here have: they are a piece of the mini-batch.
COUNTS = GlobalCounts(tokens=31, sequences=9)
LENGTHS = (5, 3, 0, 1)
Rows = dict[str, torch.Tensor]


def share(mode: str, row_tokens: int) -> float:
    """A token's weight in the loss."""
    return {
        "token-mean": 1 / COUNTS.tokens,
        "seq-mean-token-sum": 1 / COUNTS.sequences,
        "seq-mean-token-mean": 1 / COUNTS.sequences / row_tokens,
        "seq-mean-token-sum-norm": 1 / COUNTS.sequences / LIMIT,
    }[mode]


def noise(seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) * scale


def some_rows() -> tuple[Rows, torch.Tensor]:
    """Rows of an update and the mask of what counts; NaN where nothing may be read."""
    response = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    counted = response.clone()
    counted[0, 2] = False
    rows = {
        "old_log_probs": noise(1, 0.5) - 2,
        "ref_log_prob": noise(2, 0.5) - 2,
        "advantages": noise(3, 1.0),
        "rollout_is_weights": noise(4, 0.3).exp(),
        "returns": noise(5, 1.0),
        "values": noise(6, 1.0),
    }
    rows = {name: value.where(response, math.nan) for name, value in rows.items()}
    return {**rows, "response_mask": response, "loss_mask": counted}, counted


def differences(
    function: Callable[[list[list[float]]], float], at: torch.Tensor
) -> list[list[float]]:
    """Central differences of ``function`` by each element."""
    found, step = [], 1e-6
    for i in range(ROWS):
        found.append([])
        for t in range(WIDTH):
            high, low = at.tolist(), at.tolist()
            high[i][t] += step
            low[i][t] -= step
            found[i].append((function(high) - function(low)) / (2 * step))
    return found


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_actors_loss_is_policy_loss_less_entropy_bonus_plus_kl(mode: str) -> None:
    rows, mask = some_rows()
    actor = Actor(
        loss_agg_mode=mode,  # type: ignore[arg-type]
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        clip_ratio_c=1.5,
        entropy_coeff=0.7,
        use_kl_loss=True,
        kl_loss_coef=0.3,
        kl_loss_type="low_var_kl",
    )
    new, entropy = noise(7, 0.5) - 2, noise(8, 1.0).abs()

    def token(i: int, t: int, log_prob: float, spread: float) -> float:
        gain, weight, old, reference = (
            float(rows[name][i, t])
            for name in ("advantages", "rollout_is_weights", "old_log_probs", "ref_log_prob")
        )
        ratio = math.exp(log_prob - old)
        loss = max(-gain * ratio, -gain * min(max(ratio, 0.8), 1.3))
        if gain < 0:
            loss = min(loss, -gain * 1.5)
        gap = log_prob - reference
        return weight * loss - 0.7 * spread + 0.3 * (math.exp(-gap) + gap - 1)

    def whole(log_probs: list[list[float]], spreads: list[list[float]]) -> float:
        return math.fsum(
            token(i, t, log_probs[i][t], spreads[i][t]) * share(mode, int(mask[i].sum()))
            for i in range(ROWS)
            for t in range(WIDTH)
            if mask[i, t]
        )

    leaves = [x.clone().requires_grad_() for x in (new, entropy)]
    loss, scalars = ActorLoss(actor, response_limit=LIMIT)(*leaves, rows, COUNTS)
    assert loss.item() == pytest.approx(whole(new.tolist(), entropy.tolist()), rel=1e-12)
    loss.backward()
    by_log_prob = differences(lambda x: whole(x, entropy.tolist()), new)
    by_entropy = differences(lambda x: whole(new.tolist(), x), entropy)
    for leaf, expected in zip(leaves, (by_log_prob, by_entropy), strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(
            leaf.grad, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9
        )
    # The terms that are reported are those of the sum.
    parts = float(scalars["actor/pg_loss"] + 0.3 * scalars["actor/kl_loss"])
    bonus = 0.7 * sum(
        float(entropy[i, t]) * share(mode, int(mask[i].sum())) for i, t in mask.nonzero().tolist()
    )
    assert parts - bonus == pytest.approx(loss.item(), rel=1e-12)


def test_terms_that_are_off_add_nothing() -> None:
    rows, _ = some_rows()
    off = Actor(entropy_coeff=0.0, use_kl_loss=False)
    new, entropy = noise(7, 0.5) - 2, noise(8, 1.0).abs()
    loss, scalars = ActorLoss(off, response_limit=LIMIT)(new, entropy, rows, COUNTS)
    assert float(loss) == float(scalars["actor/pg_loss"])
    assert "actor/kl_loss" not in scalars


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_value_models_loss_is_half_the_larger_square(mode: str) -> None:
    rows, _ = some_rows()
    mask, bound = rows["response_mask"], 0.4
    value_loss = ValueLoss(bound, loss_agg_mode=mode, response_limit=LIMIT)
    new = noise(9, 1.0)

    def whole(values: list[list[float]]) -> float:
        total = []
        for i, t in mask.nonzero().tolist():
            target, old = float(rows["returns"][i, t]), float(rows["values"][i, t])
            held = min(max(values[i][t], old - bound), old + bound)
            worst = max((values[i][t] - target) ** 2, (held - target) ** 2)
            total.append(0.5 * worst * share(mode, int(mask[i].sum())))
        return math.fsum(total)

    leaf = new.clone().requires_grad_()
    loss, scalars = value_loss(leaf, rows, COUNTS)
    assert loss.item() == pytest.approx(whole(new.tolist()), rel=1e-12)
    assert float(scalars["critic/vf_loss"]) == loss.item()
    loss.backward()
    assert leaf.grad is not None
    expected = torch.tensor(differences(whole, new), dtype=torch.float64)
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-6, atol=1e-9)


def test_a_loss_of_a_whole_batch_is_told_how_to_become_trainable() -> None:
    register_policy_loss("test_my_custom_loss")(lambda *_args, **_options: (torch.zeros(()),) * 4)
    try:
        with pytest.raises(ValueError, match=r"'test_my_custom_loss' .* register_policy_loss_term"):
            ActorLoss(Actor(policy_loss="test_my_custom_loss"), response_limit=8)
    finally:
        del POLICY_LOSS_REGISTRY._entries["test_my_custom_loss"]
    with pytest.raises(ValueError, match=r"unknown policy loss .* known: cispo, clip_cov, "):
        ActorLoss(Actor(policy_loss="test_my_custom_loss"), response_limit=8)


def leaves(**_: object) -> None:
    sys.exit(1)


def nothing(**_: object) -> None:
    return None


def terms(loss: torch.Tensor) -> PolicyLossTerms:
    rest = torch.zeros_like(loss)
    return PolicyLossTerms(loss=loss, clipped=rest, approx_kl=rest, clipped_lower=rest)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (leaves, r"sys\.exit"),
        (nothing, "gives NoneType, not PolicyLossTerms"),
        (lambda **given: terms(given["log_prob"].sum()), r"gives loss of shape \(\); expected"),
        (lambda **given: terms(given["log_prob"] * math.inf), "a loss that is not finite"),
        (lambda **given: terms(given["log_prob"] * math.nan), "a loss that is not finite"),
        (lambda wrong, **given: None, "TypeError: .*'wrong'"),
        (lambda **given: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_policy_loss_of_the_users_is_named_by_its_fault(
    function: Callable[..., PolicyLossTerms], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry._TERMS, "_entries", dict(registry._TERMS._entries))
    register_policy_loss_terms("test_faulty")(function)
    loss = ActorLoss(Actor(policy_loss="test_faulty"), response_limit=LIMIT)
    rows, _ = some_rows()
    with pytest.raises(UserError, match=rf"policy loss 'test_faulty' \(.*{__file__} line.*{said}"):
        loss(rows["old_log_probs"], rows["values"], rows, COUNTS)
