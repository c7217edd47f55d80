from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import normal, pieces, ragged_mask, seeds, spoil, tokens

from ctrl_megatron.algorithms import LOSS_AGG_MODES, agg_loss

modes = st.sampled_from(LOSS_AGG_MODES)


def oracle(loss: torch.Tensor, mask: torch.Tensor, mode: str, factor: float | None) -> float:
    rows = [[float(loss[i, t]) for t in tokens(mask, i)] for i in range(mask.shape[0])]
    rows = [row for row in rows if row]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    total = sum(map(sum, rows)) / len(rows)
    if mode == "seq-mean-token-sum-norm":
        total /= mask.shape[1] if factor is None else factor
    return total


@given(seeds, modes, st.sampled_from([None, 17.0]))
def test_modes_equal_plain_python(seed: int, mode: str, factor: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask, loss = ragged_mask(generator, 6, 5), normal(generator, 6, 5)
    want = pytest.approx(oracle(loss, mask, mode, factor), rel=1e-6, abs=1e-12)
    assert float(agg_loss(spoil(loss, mask), mask, mode, loss_scale_factor=factor)) == want
    assert float(agg_loss(loss, mask.float(), mode, loss_scale_factor=factor)) == want


@given(seeds, modes, st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_pieces_with_global_denominators_add_up(seed: int, mode: str, sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask, loss = ragged_mask(generator, 8, 5), normal(generator, 8, 5)
    mask[3] = False
    whole_input, piece_input = loss.clone().requires_grad_(), loss.clone().requires_grad_()
    whole = agg_loss(whole_input, mask, mode)
    whole.backward()
    total = torch.zeros((), dtype=torch.float64)
    for rows in pieces(8, sizes):
        part = agg_loss(
            piece_input[rows],
            mask[rows],
            mode,
            batch_num_tokens=int(mask.sum()),
            global_batch_size=int(mask.any(dim=1).sum()),
        )
        part.backward()
        total += part.detach()
    torch.testing.assert_close(total, whole.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(piece_input.grad, whole_input.grad, rtol=1e-9, atol=1e-12)


@given(seeds, modes)
def test_padding_columns_and_empty_rows_never_matter(seed: int, mode: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask, loss = ragged_mask(generator, 4, 5), normal(generator, 4, 5)
    padded = torch.nn.functional.pad(loss, (0, 2, 0, 3), value=float("nan"))
    padded_mask = torch.nn.functional.pad(mask, (0, 2, 0, 3))
    got = agg_loss(padded, padded_mask, mode, loss_scale_factor=5)
    torch.testing.assert_close(got, agg_loss(loss, mask, mode, loss_scale_factor=5))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_batch_without_tokens_has_loss_and_gradient_zero(mode: str) -> None:
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    result = agg_loss(loss, torch.zeros(2, 3), mode)
    result.backward()
    assert float(result.detach()) == 0.0
    assert torch.equal(loss.grad, torch.zeros(2, 3))  # type: ignore[arg-type]


def test_wrong_calls_are_errors() -> None:
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"unknown loss_agg_mode 'mean'; known: token-mean, "):
        agg_loss(ones, ones, "mean")
    with pytest.raises(ValueError, match=r"loss_mat has shape \(2, 3\); expected \(3, 3\)"):
        agg_loss(ones, torch.ones(3, 3), "token-mean")
    with pytest.raises(ValueError, match="divides by batch_num_tokens"):
        agg_loss(ones, ones, "token-mean", global_batch_size=2)
    with pytest.raises(ValueError, match="divides by global_batch_size"):
        agg_loss(ones, ones, "seq-mean-token-sum", batch_num_tokens=6)
