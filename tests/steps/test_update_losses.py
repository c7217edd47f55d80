"""The losses that the optimizers minimise, against formulas in plain Python: every term
with its sign and its share of the mini-batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ctrl_megatron.algorithms import (
    LOSS_AGG_MODES,
    POLICY_LOSS_REGISTRY,
    PolicyLossTerms,
    agg_loss,
    register_policy_loss,
    zero_outside_mask,
)
from ctrl_megatron.config import Actor
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.loss_scale import GlobalCounts
from ctrl_megatron.steps.losses import ActorLoss, ValueLoss

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


@pytest.fixture
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the registrations of a test when it ends."""
    monkeypatch.setattr(POLICY_LOSS_REGISTRY, "_entries", dict(POLICY_LOSS_REGISTRY._entries))


def guides_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Any = None,
    *,
    sharpness: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A loss in the form of siiRL's guide (section 11.4) with a hyper-parameter of its own."""
    ratio = (sharpness * (log_prob - old_log_prob)).exp()
    high = ratio > 1 + config.clip_ratio
    loss = -advantages * torch.where(high, 1 + config.clip_ratio, ratio) * rollout_is_weights
    return (
        agg_loss(loss, response_mask, loss_agg_mode),
        agg_loss(high.double(), response_mask, "token-mean"),
        agg_loss(old_log_prob - log_prob, response_mask, "token-mean"),
        torch.zeros((), dtype=log_prob.dtype),
    )


def per_token(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    rollout_is_weights: torch.Tensor,
    sharpness: float = 1.0,
) -> PolicyLossTerms:
    """The same loss per token."""
    old, new = (zero_outside_mask(x, response_mask) for x in (old_log_prob, log_prob))
    ratio = (sharpness * (new - old)).exp()
    high = ratio > 1 + config.clip_ratio
    held = torch.where(high, 1 + config.clip_ratio, ratio)
    return PolicyLossTerms(
        loss=-zero_outside_mask(advantages * rollout_is_weights, response_mask) * held,
        clipped=zero_outside_mask(high.double(), response_mask),
        approx_kl=(old - new).detach(),
        clipped_lower=torch.zeros_like(new),
    )


@pytest.mark.usefixtures("own_names")
@pytest.mark.parametrize("mode", LOSS_AGG_MODES[:3])
@pytest.mark.parametrize("cuts", [(4,), (1, 1, 1, 1), (2, 2), (1, 3)])
def test_the_guides_loss_trains_as_the_same_loss_per_token(mode: str, cuts: tuple[int]) -> None:
    """However a mini-batch is cut into micro-batches, one of them without a token: same loss, same
    gradient, same scalars."""
    register_policy_loss("test_guide")(guides_loss)
    register_policy_loss("test_terms")(per_token)
    rows, mask = some_rows()
    rows = {name: value.nan_to_num() for name, value in rows.items()}
    counts = GlobalCounts(tokens=int(mask.sum()), sequences=int(mask.any(dim=1).sum()))
    results = []
    for name, sizes in (("test_guide", cuts), ("test_terms", (ROWS,))):
        actor = Actor(
            policy_loss=name,
            policy_loss_options={"sharpness": 2},
            loss_agg_mode=mode,  # type: ignore[arg-type]
            clip_ratio=0.3,
        )
        new = (noise(7, 0.5) - 2).requires_grad_()
        loss_of, start, total = ActorLoss(actor, response_limit=LIMIT), 0, dict[str, float]()
        for size in sizes:
            part = {key: value[start : start + size] for key, value in rows.items()}
            loss, scalars = loss_of(new[start : start + size], new.detach()[:size], part, counts)
            loss.backward()
            for key, value in scalars.items():
                total[key] = total.get(key, 0.0) + float(value)
            start += size
        results.append((total, new.grad))
    (found, gradient), (wanted, expected) = results
    assert found == pytest.approx(wanted, rel=1e-12)
    assert found["actor/pg_clipfrac"] > 0 and gradient is not None and expected is not None
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.usefixtures("own_names")
def test_the_option_of_a_loss_changes_it_and_a_wrong_one_is_refused() -> None:
    register_policy_loss("test_guide")(guides_loss)
    rows, _ = some_rows()
    new = noise(7, 0.5) - 2
    found = []
    for options in ({}, {"sharpness": 0.5}, {"sharpness": "0.5"}):
        actor = Actor(policy_loss="test_guide", policy_loss_options=options)
        loss, _ = ActorLoss(actor, response_limit=LIMIT)(new, new, rows, COUNTS)
        found.append(float(loss))
    assert found[0] != found[1] == found[2]
    actor = Actor(policy_loss="test_guide", policy_loss_options={"sharpnes": 2.0})
    with pytest.raises(UserError, match="no option 'sharpnes'; did you mean 'sharpness'"):
        ActorLoss(actor, response_limit=LIMIT)


@pytest.mark.usefixtures("own_names")
def test_scalars_cannot_be_divided_by_the_response_limit() -> None:
    register_policy_loss("test_guide")(guides_loss)
    rows, _ = some_rows()
    actor = Actor(policy_loss="test_guide", loss_agg_mode="seq-mean-token-sum-norm")
    with pytest.raises(UserError, match="return PolicyLossTerms, or choose another loss_agg_mode"):
        ActorLoss(actor, response_limit=LIMIT)(rows["values"], rows["values"], rows, COUNTS)


def test_an_unknown_loss_is_named_with_the_known_ones() -> None:
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
        (nothing, "returns NoneType, neither PolicyLossTerms nor four scalars"),
        (lambda **given: terms(given["log_prob"].sum()), r"returns loss of shape \(\); expected"),
        (lambda **given: terms(given["log_prob"] * math.inf), "a loss that is not finite"),
        (lambda **given: terms(given["log_prob"] * math.nan), "a loss that is not finite"),
        (lambda **given: (given["log_prob"],) * 4, r"returns pg_loss of shape \(4, 5\); expected"),
        (lambda **given: (given["log_prob"].sum() * math.nan,) * 4, "a loss that is not finite"),
        (lambda **given: (given["log_prob"].sum(),) * 3, "returns tuple, neither PolicyLossTerms"),
        (lambda **given: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_policy_loss_of_the_users_is_named_by_its_fault(
    function: Callable[..., Any], said: str, own_names: None
) -> None:
    register_policy_loss("test_faulty")(function)
    loss = ActorLoss(Actor(policy_loss="test_faulty"), response_limit=LIMIT)
    rows, _ = some_rows()
    with pytest.raises(UserError, match=rf"policy loss 'test_faulty' \(.*{__file__} line.*{said}"):
        loss(rows["old_log_probs"], rows["values"], rows, COUNTS)
