from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import normal, pieces, ragged_mask, seeds, spoil, tokens

from ctrl_megatron.algorithms import (
    LOSS_AGG_MODES,
    agg_loss,
    compute_value_loss,
    explained_variance,
    explained_variance_sums,
    value_loss_terms,
)

RANGE = 0.3
modes = st.sampled_from(LOSS_AGG_MODES)


def batch(seed: int, rows: int = 6, width: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = normal(generator, rows, width)
    return {
        "vpreds": values + normal(generator, rows, width, 0.5),
        "returns": normal(generator, rows, width),
        "values": values,
        "response_mask": ragged_mask(generator, rows, width),
    }


def token_oracle(new: float, target: float, old: float) -> tuple[float, float]:
    held = min(max(new, old - RANGE), old + RANGE)
    plain, clipped = (new - target) ** 2, (held - target) ** 2
    return max(plain, clipped) / 2, float(clipped > plain)


@given(seeds, modes)
def test_value_loss_equals_plain_python(seed: int, mode: str) -> None:
    data = batch(seed)
    mask = data["response_mask"]
    losses, clipped = torch.zeros(mask.shape, dtype=torch.float64), []
    for i in range(len(mask)):
        for t in tokens(mask, i):
            point = (float(data[k][i, t]) for k in ("vpreds", "returns", "values"))
            losses[i, t], share = token_oracle(*point)
            clipped.append(share)
    dirty = {k: spoil(v, mask) if k != "response_mask" else v for k, v in data.items()}
    loss, share = compute_value_loss(**dirty, cliprange_value=RANGE, loss_agg_mode=mode)
    # The aggregation has its own oracle in test_aggregation.
    assert float(loss) == pytest.approx(float(agg_loss(losses, mask, mode)), rel=1e-6)
    assert float(share) == pytest.approx(sum(clipped) / len(clipped), rel=1e-6)


@given(seeds, modes)
def test_gradient_and_hidden_places(seed: int, mode: str) -> None:
    data = batch(seed, rows=3, width=3)
    mask, gap = data["response_mask"], data["vpreds"] - data["values"]
    # Away from the bounds, and from where both errors are alike.
    near = (gap.abs() - RANGE).abs() < 1e-2
    data["vpreds"] = torch.where(near, data["vpreds"] + 0.05, data["vpreds"])
    for _ in range(4):
        held = data["values"] + (data["vpreds"] - data["values"]).clamp(-RANGE, RANGE)
        plain, cut = ((x - data["returns"]).abs() for x in (data["vpreds"], held))
        tied = (plain - cut).abs() < 1e-2
        tied &= (held - data["vpreds"]).abs() > 1e-9
        data["vpreds"] = torch.where(tied, data["vpreds"] + 0.03, data["vpreds"])
    vpreds = data.pop("vpreds").requires_grad_()

    def loss(x: torch.Tensor, **fields: torch.Tensor) -> torch.Tensor:
        return compute_value_loss(x, **fields, cliprange_value=RANGE, loss_agg_mode=mode)[0]

    assert torch.autograd.gradcheck(lambda x: loss(x, **data), (vpreds,))
    loss(vpreds, **data).backward()
    dirty = spoil(vpreds.detach(), mask).requires_grad_()
    spoilt = {k: spoil(v, mask) if k != "response_mask" else v for k, v in data.items()}
    loss(dirty, **spoilt).backward()
    assert dirty.grad is not None
    torch.testing.assert_close(dirty.grad, vpreds.grad, rtol=0, atol=0)
    assert torch.all(dirty.grad[~mask] == 0)


@given(seeds, modes, st.integers(1, 6))
def test_pieces_with_global_denominators_add_up(seed: int, mode: str, size: int) -> None:
    data = batch(seed)
    mask = data["response_mask"]
    totals, grads = [], []
    for sizes in ([6], [size]):
        vpreds = data["vpreds"].clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for rows in pieces(6, sizes):
            share = {k: v[rows] for k, v in data.items()}
            terms = value_loss_terms(**{**share, "vpreds": vpreds[rows]}, cliprange_value=RANGE)
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
        grads.append(vpreds.grad)
    torch.testing.assert_close(totals[0], totals[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-12)


@given(seeds)
def test_clipping_never_lowers_the_loss(seed: int) -> None:
    data = batch(seed)
    terms = value_loss_terms(**data, cliprange_value=RANGE)
    free = value_loss_terms(**data, cliprange_value=1e6)
    assert torch.all(terms.loss >= free.loss)
    assert torch.equal(terms.loss != free.loss, terms.clipped.bool())
    assert not free.clipped.any()


@given(seeds, st.integers(1, 6), st.sampled_from([0.0, 100.0]))
def test_explained_variance_of_added_sums(seed: int, size: int, offset: float) -> None:
    data = batch(seed)
    mask, values, returns = data["response_mask"], data["values"], data["returns"] + offset
    chosen, guesses = returns[mask].tolist(), values[mask].tolist()
    mean = sum(chosen) / len(chosen)
    errors = [r - v for r, v in zip(chosen, guesses, strict=True)]
    error_mean = sum(errors) / len(errors)
    want = 1 - sum((e - error_mean) ** 2 for e in errors) / sum((r - mean) ** 2 for r in chosen)
    sums = torch.zeros(5, dtype=torch.float64)
    for rows in pieces(6, [size]):
        sums += explained_variance_sums(
            spoil(values, mask)[rows], spoil(returns, mask)[rows], mask[rows]
        )
    assert explained_variance(sums) == pytest.approx(want, rel=1e-6, abs=1e-9)


def test_explained_variance_of_special_cases() -> None:
    returns, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3)
    perfect = explained_variance_sums(returns, returns, mask)
    assert explained_variance(perfect) == 1.0
    shifted = explained_variance_sums(returns + 3, returns, mask)
    assert explained_variance(shifted) == pytest.approx(1.0)
    constant = explained_variance_sums(torch.zeros(1, 3), returns, mask)
    assert explained_variance(constant) == pytest.approx(0.0)
    flat = explained_variance_sums(returns, torch.full((1, 3), 0.1), mask)
    assert math.isnan(explained_variance(flat))
    assert math.isnan(explained_variance(torch.zeros(5)))


def test_a_negative_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cliprange_value must be at least 0, got -0\.1"):
        compute_value_loss(*[torch.ones(1, 1)] * 4, cliprange_value=-0.1)
