"""Every policy loss beside its formula in plain Python: values, gradients, what must not matter.

A formula gets the log-probs twice: as they vary, and as they stand where the loss holds something
constant in the backward pass. Differences of the first give the gradient that autograd must find.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import normal, pieces, ragged_mask, seeds, spoil, tokens

from ctrl_megatron.algorithms import (
    LOSS_AGG_MODES,
    POLICY_LOSS_REGISTRY,
    agg_loss,
    get_policy_loss,
    register_policy_loss,
)
from ctrl_megatron.config import KEYS

COVARIANCE = {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.05, "clip_cov_ub": 5.0}
CONFIG = SimpleNamespace(
    clip_ratio=0.2,
    clip_ratio_low=0.25,
    clip_ratio_high=0.4,
    clip_ratio_c=3.0,
    kl_cov_ratio=0.3,
    ppo_kl_coef=0.7,
    **COVARIANCE,
)
LOW, HIGH = CONFIG.clip_ratio_low, CONFIG.clip_ratio_high
Row = list[float]


def clipped_surrogate(ratio: float, gain: float) -> float:
    """By cases, of which the pessimistic one counts."""
    if gain >= 0:
        return -gain * min(ratio, 1 + HIGH)
    return -gain * max(ratio, 1 - LOW)


def vanilla(old: Row, new: Row, held: Row, gain: Row, selected: list[bool]) -> Row:
    found = [clipped_surrogate(math.exp(n - o), g) for o, n, g in zip(old, new, gain, strict=True)]
    return [min(x, -g * CONFIG.clip_ratio_c) if g < 0 else x for x, g in zip(found, gain)]  # noqa: B905


def gspo(old: Row, new: Row, held: Row, gain: Row, selected: list[bool]) -> Row:
    length = math.prod(math.exp(h - o) for h, o in zip(held, old, strict=True)) ** (1 / len(old))
    return [
        clipped_surrogate(length * math.exp(n - h), g)
        for n, h, g in zip(new, held, gain, strict=True)
    ]


def cpgd(old: Row, new: Row, held: Row, gain: Row, selected: list[bool]) -> Row:
    return [
        -g * (min(n - o, math.log(1 + HIGH)) if g > 0 else max(n - o, math.log(1 - LOW)))
        for o, n, g in zip(old, new, gain, strict=True)
    ]


def gpg(old: Row, new: Row, held: Row, gain: Row, selected: list[bool]) -> Row:
    return [-g * n for n, g in zip(new, gain, strict=True)]


def cispo(old: Row, new: Row, held: Row, gain: Row, selected: list[bool]) -> Row:
    weights = [min(max(math.exp(h - o), 1 - LOW), 1 + HIGH) for o, h in zip(old, held, strict=True)]
    return [-w * g * n for w, n, g in zip(weights, new, gain, strict=True)]


def clip_cov(old: Row, new: Row, held: Row, gain: Row, selected: list[bool]) -> Row:
    return [
        0.0 if chosen else clipped_surrogate(math.exp(n - o), g)
        for o, n, g, chosen in zip(old, new, gain, selected, strict=True)
    ]


def kl_cov(old: Row, new: Row, held: Row, gain: Row, selected: list[bool]) -> Row:
    return [
        -g * math.exp(n - o) + (CONFIG.ppo_kl_coef * abs(n - o) if chosen else 0.0)
        for o, n, g, chosen in zip(old, new, gain, selected, strict=True)
    ]


def geo_mean(old: Row, new: Row, held: Row, gain: Row, selected: list[bool]) -> Row:
    product = 1.0
    for o, n, g in zip(old, new, gain, strict=True):
        ratio = math.exp(n - o)
        if g > 0:
            ratio = min(ratio, math.exp(HIGH))
        elif g < 0:
            ratio = max(ratio, math.exp(-LOW))
        product *= ratio
    count = len(old)
    return [-sum(gain) / count * product ** (1 / count)] * count


def sapo(old: Row, new: Row, held: Row, gain: Row, selected: list[bool]) -> Row:
    found = []
    for o, n, g in zip(old, new, gain, strict=True):
        tau = 1.0 if g > 0 else 1.05
        found.append(-g * 4 / tau / (1 + math.exp(-tau * (math.exp(n - o) - 1))))
    return found


FORMULAS: dict[str, Callable[..., Row]] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cpgd": cpgd,
    "gpg": gpg,
    "cispo": cispo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "geo_mean": geo_mean,
    "sapo": sapo,
}
SELECTING = ("clip_cov", "kl_cov")
losses = st.sampled_from(sorted(FORMULAS))
modes = st.sampled_from(LOSS_AGG_MODES)


def batch(seed: int, rows: int = 6, width: int = 5) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask(generator, rows, width)
    old = normal(generator, rows, width) - 2.0
    return {
        "old_log_prob": old,
        "log_prob": old + normal(generator, rows, width, 0.4),
        "advantages": normal(generator, rows, width),
        "response_mask": mask,
        "rollout_is_weights": torch.rand(mask.shape, generator=generator, dtype=torch.float64) * 2,
        "selected": (torch.rand(mask.shape, generator=generator) < 0.4) & mask,
    }


def taken(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """The fields of the batch that the loss uses."""
    return {k: v for k, v in data.items() if k != "selected" or name in SELECTING}


def formula(name: str, data: dict[str, Any], new: torch.Tensor) -> torch.Tensor:
    """(B, R) losses at the log-probs ``new``, constants as in ``data``."""
    mask = data["response_mask"]
    found = torch.zeros(mask.shape, dtype=torch.float64)
    for i in range(len(mask)):
        places = list(tokens(mask, i))
        if not places:
            continue
        old, held, gain = (
            [float(data[key][i, t]) for t in places]
            for key in ("old_log_prob", "log_prob", "advantages")
        )
        chosen = [bool(data["selected"][i, t]) for t in places]
        values = FORMULAS[name](old, [float(new[i, t]) for t in places], held, gain, chosen)
        weights = [float(data["rollout_is_weights"][i, t]) for t in places]
        if name == "geo_mean":
            weights = [math.prod(weights) ** (1 / len(weights))] * len(weights)
        for t, value, weight in zip(places, values, weights, strict=True):
            found[i, t] = value * weight
    return found


def away_from_corners(data: dict[str, Any]) -> dict[str, Any]:
    """Log-probs moved so that finite differences do not step over a corner."""
    mask, old = data["response_mask"], data["old_log_prob"]
    new = data["log_prob"]
    corners = [math.log(1 - LOW), math.log(1 + HIGH), -LOW, HIGH, math.log(3.0), 0.0]
    for _ in range(3):
        for corner in corners:
            new = torch.where(((new - old) - corner).abs() < 2e-3, new + 0.005, new)
        # gspo's corners are those of the row's mean.
        gap = torch.where(mask, new - old, 0.0).sum(1, keepdim=True)
        gap = gap / mask.sum(1, keepdim=True).clamp(min=1)
        for corner in corners[:2]:
            new = torch.where((gap - corner).abs() < 2e-3, new + 0.005, new)
    return {**data, "log_prob": new}


def test_every_loss_has_a_formula_here() -> None:
    assert set(FORMULAS) == set(POLICY_LOSS_REGISTRY)


@given(seeds, losses)
def test_losses_equal_plain_python(seed: int, name: str) -> None:
    data = batch(seed)
    want = formula(name, data, data["log_prob"])
    got = POLICY_LOSS_REGISTRY.get(name).function(**taken(name, data), config=CONFIG)
    torch.testing.assert_close(got.loss, want, rtol=1e-6, atol=1e-12)
    kl = torch.where(data["response_mask"], data["old_log_prob"] - data["log_prob"], 0.0)
    torch.testing.assert_close(got.approx_kl, kl, rtol=1e-6, atol=1e-12)


@given(seeds, losses, modes)
def test_the_whole_batch_form_aggregates_the_terms(seed: int, name: str, mode: str) -> None:
    data = batch(seed)
    mask = data["response_mask"]
    got = get_policy_loss(name)(**taken(name, data), config=CONFIG, loss_agg_mode=mode)
    terms = POLICY_LOSS_REGISTRY.get(name).function(**taken(name, data), config=CONFIG)
    want = [float(agg_loss(formula(name, data, data["log_prob"]), mask, mode))]
    for part in (terms.clipped, terms.approx_kl, terms.clipped_lower):
        want.append(float(part[mask].mean()))
        assert torch.all(part[~mask] == 0)
    assert [float(x) for x in got] == pytest.approx(want, rel=1e-6, abs=1e-12)


@given(seeds, losses)
def test_gradients_equal_differences_of_the_formula(seed: int, name: str) -> None:
    data = away_from_corners(batch(seed, rows=3, width=4))
    generator = torch.Generator().manual_seed(seed)
    weights = normal(generator, 3, 4)
    log_prob = data["log_prob"].clone().requires_grad_()
    terms = POLICY_LOSS_REGISTRY.get(name).function(
        **{**taken(name, data), "log_prob": log_prob}, config=CONFIG
    )
    (terms.loss * weights).sum().backward()
    want = torch.zeros(3, 4, dtype=torch.float64)
    step = 1e-5
    for i in range(3):
        for t in tokens(data["response_mask"], i):
            nudge = torch.zeros(3, 4, dtype=torch.float64)
            nudge[i, t] = step
            up, down = (formula(name, data, data["log_prob"] + s * nudge) for s in (1, -1))
            want[i, t] = ((up - down) * weights).sum() / (2 * step)
    assert log_prob.grad is not None
    torch.testing.assert_close(log_prob.grad, want, rtol=1e-6, atol=1e-7)


def gradcheck(name: str, data: dict[str, Any], mode: str) -> bool:
    fixed = taken(name, data)
    log_prob = fixed.pop("log_prob").requires_grad_()
    return torch.autograd.gradcheck(
        lambda x: get_policy_loss(name)(**fixed, log_prob=x, config=CONFIG, loss_agg_mode=mode)[0],
        (log_prob,),
    )


@given(
    seeds,
    st.sampled_from(["vanilla", "cpgd", "gpg", "clip_cov", "kl_cov", "geo_mean", "sapo"]),
    modes,
)
def test_gradcheck(seed: int, name: str, mode: str) -> None:
    assert gradcheck(name, away_from_corners(batch(seed, rows=3, width=3)), mode)


@given(seeds)
def test_gradcheck_of_gspo_with_one_advantage_per_row(seed: int) -> None:
    """Then the straight-through form has the gradient of the sequence's ratio itself."""
    data = away_from_corners(batch(seed, rows=3, width=3))
    data["advantages"] = data["advantages"][:, :1].expand(3, 3)
    data["rollout_is_weights"] = data["rollout_is_weights"][:, :1].expand(3, 3)
    assert gradcheck("gspo", data, "seq-mean-token-mean")


@given(seeds, modes, st.sampled_from([-3.0, 3.0]))
def test_gradcheck_of_cispo_where_every_weight_is_at_its_bound(
    seed: int, mode: str, gap: float
) -> None:
    data = batch(seed, rows=3, width=3)
    data["log_prob"] = data["old_log_prob"] + gap
    assert gradcheck("cispo", data, mode)


@given(seeds, losses, modes)
def test_what_the_mask_hides_reaches_neither_value_nor_gradient(
    seed: int, name: str, mode: str
) -> None:
    data = batch(seed)
    mask = data["response_mask"]
    results, grads = [], []
    for spoilt in (False, True):
        fields = {
            k: spoil(v, mask) if spoilt and v.dtype != torch.bool else v.clone()
            for k, v in taken(name, data).items()
        }
        if "selected" in fields and spoilt:
            fields["selected"] = fields["selected"] | ~mask
        fields["log_prob"].requires_grad_()
        found = get_policy_loss(name)(**fields, config=CONFIG, loss_agg_mode=mode)
        assert not any(x.requires_grad for x in found[1:])
        found[0].backward()
        results.append(torch.stack([x.detach() for x in found]))
        grads.append(fields["log_prob"].grad)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
    assert torch.all(grads[0][~mask] == 0)


@given(seeds, losses)
def test_padding_never_matters(seed: int, name: str) -> None:
    data = batch(seed)
    padded = {
        k: torch.nn.functional.pad(v, (1, 3, 0, 2), value=0 if v.dtype == torch.bool else math.nan)
        for k, v in taken(name, data).items()
    }
    got = POLICY_LOSS_REGISTRY.get(name).function(**padded, config=CONFIG).loss
    want = POLICY_LOSS_REGISTRY.get(name).function(**taken(name, data), config=CONFIG).loss
    torch.testing.assert_close(got[:6, 1:6], want, rtol=1e-12, atol=1e-14)
    assert float(got.abs().sum()) == pytest.approx(float(want.abs().sum()), rel=1e-12)


@given(seeds, losses, modes, st.integers(1, 7))
def test_pieces_with_global_denominators_add_up(seed: int, name: str, mode: str, size: int) -> None:
    data = batch(seed, rows=7)
    mask = data["response_mask"]
    totals, grads = [], []
    for sizes in ([7], [size]):
        log_prob = data["log_prob"].clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for rows in pieces(7, sizes):
            fields = {k: v[rows] for k, v in taken(name, data).items()}
            terms = POLICY_LOSS_REGISTRY.get(name).function(
                **{**fields, "log_prob": log_prob[rows]}, config=CONFIG
            )
            part = agg_loss(
                terms.loss,
                mask[rows],
                mode,
                batch_num_tokens=mask.sum(),
                global_batch_size=mask.any(dim=1).sum(),
            )
            part.backward()
            total += part.detach()
        totals.append(total)
        grads.append(log_prob.grad)
    torch.testing.assert_close(totals[0], totals[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_at_the_old_policy_the_gradient_is_the_policy_gradient(name: str) -> None:
    data = batch(1)
    data["advantages"] = data["advantages"][:, :1].expand(6, 5).clone()
    data["selected"] = torch.zeros_like(data["response_mask"])
    del data["rollout_is_weights"]
    log_prob = data["old_log_prob"].clone().requires_grad_()
    loss, clipped, kl, lower = get_policy_loss(name)(
        **{**taken(name, data), "log_prob": log_prob},
        config=CONFIG,
        loss_agg_mode="seq-mean-token-mean",
    )
    loss.backward()
    mask = data["response_mask"]
    count = mask.sum(1, keepdim=True).clamp(min=1) * mask.any(1).sum()
    want = torch.where(mask, -data["advantages"], 0.0) / count
    torch.testing.assert_close(log_prob.grad, want)
    assert float(clipped) == float(kl) == float(lower) == 0.0


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_impossible_log_probs_and_empty_batches_stay_finite(name: str) -> None:
    data: dict[str, Any] = {
        "old_log_prob": torch.tensor([[-500.0, -1.0, -500.0], [-1.0, -1.0, -1.0]]),
        "log_prob": torch.tensor([[-1.0, -500.0, -1.0], [-1.0, -1.0, -1.0]], requires_grad=True),
        "advantages": torch.tensor([[0.0, -1.0, -1.0], [1.0, 1.0, 1.0]]),
        "response_mask": torch.tensor([[1, 1, 1], [0, 0, 0]]),
    }
    found = get_policy_loss(name)(**data, config=CONFIG)
    found[0].backward()
    assert all(torch.isfinite(x) for x in found)
    assert torch.isfinite(data["log_prob"].grad).all()
    data["response_mask"] = torch.zeros(2, 3)
    assert [float(x.detach()) for x in get_policy_loss(name)(**data, config=CONFIG)] == [0.0] * 4


def test_the_shares_say_what_was_clipped() -> None:
    ratio = torch.tensor([[2.0, 0.5, 2.0, 0.5, 1.1]], dtype=torch.float64)
    data: dict[str, Any] = {
        "old_log_prob": torch.zeros_like(ratio),
        "log_prob": ratio.log(),
        "advantages": torch.tensor([[1.0, 1.0, -1.0, -1.0, 1.0]], dtype=torch.float64),
        "response_mask": torch.ones_like(ratio),
    }
    want = {
        "vanilla": [1, 0, 0, 1, 0],
        "cpgd": [1, 0, 0, 1, 0],
        "geo_mean": [1, 0, 0, 1, 0],
        "cispo": [1, 1, 1, 1, 0],
        "gpg": [0] * 5,
        "sapo": [0] * 5,
        "kl_cov": [0] * 5,
    }
    for name, expected in want.items():
        chosen = {"selected": torch.zeros(1, 5)} if name in SELECTING else {}
        terms = POLICY_LOSS_REGISTRY.get(name).function(**data, config=CONFIG, **chosen)
        assert terms.clipped[0].tolist() == expected, name
    chosen = torch.tensor([[False, False, True, False, False]])
    terms = POLICY_LOSS_REGISTRY.get("clip_cov").function(**data, config=CONFIG, selected=chosen)
    assert terms.clipped[0].tolist() == [1, 0, 1, 1, 0]
    row = {**data, "advantages": torch.ones_like(ratio), "log_prob": data["log_prob"] + 1}
    terms = POLICY_LOSS_REGISTRY.get("gspo").function(**row, config=CONFIG)
    assert terms.clipped[0].tolist() == [1] * 5


def test_an_open_lower_side() -> None:
    data: dict[str, Any] = {
        "old_log_prob": torch.zeros(1, 1),
        "log_prob": torch.full((1, 1), -5.0, requires_grad=True),
        "advantages": torch.full((1, 1), -1.0),
        "response_mask": torch.ones(1, 1),
    }
    config = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=1.0, clip_ratio_high=None)
    loss = get_policy_loss("cpgd")(**data, config=config)[0]
    assert float(loss.detach()) == -5.0
    loss = get_policy_loss("cispo")(**data, config=config)[0]
    assert float(loss.detach()) == pytest.approx(-5.0 * math.exp(-5.0))


def declared_keys(loss: str) -> set[str]:
    """The keys that the configuration declares to be read with this policy loss."""
    switch = ("actor_rollout_ref.actor.policy_loss",)
    return {
        key.name.rpartition(".")[2]
        for key in KEYS.values()
        for condition in key.read
        if condition.switches == switch and condition.holds(loss)
    }


def test_a_loss_reads_the_keys_that_are_declared_to_be_its() -> None:
    class Watched:
        def __init__(self) -> None:
            self.read: set[str] = set()

        def __getattr__(self, name: str) -> Any:
            self.read.add(name)
            return getattr(CONFIG, name)

    data = batch(3)
    del data["selected"]
    for name in FORMULAS:
        watched = Watched()
        # None sends the range to clip_ratio, a number does not ask for it.
        for low in (None, 0.2):
            CONFIG.clip_ratio_low = low
            get_policy_loss(name)(**data, config=watched)
        CONFIG.clip_ratio_low = LOW
        assert watched.read == declared_keys(name), name


def test_wrong_options_are_named() -> None:
    data = batch(4)
    for name in sorted(set(FORMULAS) - {"gpg", "sapo"}):
        with pytest.raises(ValueError, match=f"compute_policy_loss_{name} needs config"):
            get_policy_loss(name)(**taken(name, data))
    get_policy_loss("gpg")(**taken("gpg", data))
    with pytest.raises(ValueError, match="tau_pos and tau_neg must be above 0"):
        get_policy_loss("sapo")(**taken("sapo", data), tau_neg=0.0)
    wrong = SimpleNamespace(clip_ratio=-0.1, clip_ratio_low=None, clip_ratio_high=None)
    for name in ("gspo", "cpgd", "cispo", "geo_mean"):
        with pytest.raises(ValueError, match=r"low=-0\.1"):
            get_policy_loss(name)(**taken(name, data), config=wrong)
    with pytest.raises(ValueError, match="unknown policy loss 'ppo'; known: "):
        POLICY_LOSS_REGISTRY.get("ppo")


def test_the_registry_keeps_aggregations_and_selections() -> None:
    terms = POLICY_LOSS_REGISTRY.get("gspo").function
    assert register_policy_loss("gspo", loss_agg_mode="seq-mean-token-mean")(terms) is terms
    with pytest.raises(ValueError, match="'gspo' is registered already"):
        register_policy_loss("gspo")(terms)
    for name in FORMULAS:
        assert (POLICY_LOSS_REGISTRY.get(name).selection is not None) == (name in SELECTING)
