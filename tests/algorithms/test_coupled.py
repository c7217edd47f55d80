"""Coupled masks by their definition, and the score's weights by exact expectation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.algorithms.coupled import (
    HIGHEST,
    LOWEST,
    CoupledMaskOptions,
    coupled_log_prob_weights,
    draw_coupled_masks,
)

lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=5)


def attention(rows: list[tuple[int, int]], prompt: int, response: int) -> torch.Tensor:
    column = torch.arange(prompt + response)
    return torch.stack([((column >= prompt - p) & (column < prompt + r)).long() for p, r in rows])


@settings(deadline=None, max_examples=30)
@given(lengths, st.integers(0, 2**40), st.integers(0, 3))
def test_masks_depend_on_a_rows_own_tokens_only(
    rows: list[tuple[int, int]], seed: int, more: int
) -> None:
    rule = CoupledMaskOptions(p_mask_prompt=0.4)
    seeds = [rule.row_seed(seed, 1, f"row {i}", 0) for i in range(len(rows))]
    seen = attention(rows, 6, 9)
    whole = draw_coupled_masks(seen, 9, seeds, rule)
    assert not (whole.masked & ~seen.bool()).any()
    assert bool(((whole.share >= LOWEST) & (whole.share <= HIGHEST)).all())
    # Other padding, one row alone, without masks of the prompt.
    for index, row in enumerate(rows):
        alone = draw_coupled_masks(
            attention([row], 6 + more, 9 + more), 9 + more, [seeds[index]], rule
        )
        assert torch.equal(alone.masked[0, more : more + 15], whole.masked[index])
        assert alone.share[0] == whole.share[index]
        plain = draw_coupled_masks(seen[index : index + 1], 9, [seeds[index]], CoupledMaskOptions())
        assert torch.equal(plain.masked[0, 6:], whole.masked[index, 6:])
        assert not plain.masked[0, :6].any()


def test_a_share_of_the_tokens_is_masked() -> None:
    rows, tokens = 400, 50
    seen = attention([(6, tokens)] * rows, 6, tokens)
    masks = draw_coupled_masks(
        seen, tokens, list(range(rows)), CoupledMaskOptions(p_mask_prompt=0.15)
    )
    share, masked = masks.share, masks.masked.float()
    # The middle of [0.2, 0.8] and the spread of a uniform number, each within five errors.
    assert abs(float(share.mean()) - 0.5) < 5 * 0.6 / 12**0.5 / rows**0.5
    assert abs(float(share.std()) - 0.6 / 12**0.5) < 0.02
    error = (share * (1 - share) / tokens).sqrt()
    z = (masked[:, 6:].mean(dim=1) - share) / error
    assert abs(float(z.mean())) < 5 / rows**0.5 and 0.8 < float(z.std()) < 1.2
    assert abs(float(masked[:, :6].mean()) - 0.15) < 5 * (0.15 * 0.85 / 6 / rows) ** 0.5


def test_seeds_rotate_with_step_and_iteration_only_if_masks_do() -> None:
    turning, fixed = CoupledMaskOptions(), CoupledMaskOptions(random_masking=False)
    places = [(step, row, i) for step in range(3) for row in ("a:0", "a:1") for i in range(2)]
    assert len({turning.row_seed(7, *place) for place in places}) == len(places)
    assert len({fixed.row_seed(7, *place) for place in places}) == 2
    assert turning.row_seed(7, 1, "a:0", 0) != turning.row_seed(8, 1, "a:0", 0)
    assert all(0 <= turning.row_seed(7, *place) < 2**63 for place in places)
    with pytest.raises(ValueError, match="p_mask_prompt"):
        CoupledMaskOptions(p_mask_prompt=1.0)


def test_each_version_has_its_inverse_probability() -> None:
    """Over the masks of a token, the expected weight of its partial log-prob is 1 = 2 x 1/2."""
    share = torch.tensor(0.3)
    whole, masked = coupled_log_prob_weights(torch.tensor([True]), share)
    _, shown = coupled_log_prob_weights(torch.tensor([False]), share)
    assert whole == 0.5
    assert float(masked) == pytest.approx(0.5 / 0.3) and float(shown) == pytest.approx(0.5 / 0.7)
    expected = share * masked + (1 - share) * shown
    assert float(expected) == pytest.approx(1.0)
