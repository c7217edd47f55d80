"""Micro-batches of masked versions against the definition of the coupled score, token by token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_micro_batch import CPU, P, R, ragged

from ctrl_megatron.algorithms.denoising import draw_denoising_masks
from ctrl_megatron.models.masked_versions import split_into_masked_versions
from ctrl_megatron.models.micro_batch import MicroBatch
from ctrl_megatron.models.shape import MaskedDiffusion

MASK = 99


def masked(seed: int, rows: int) -> dict[str, torch.Tensor]:
    batch = ragged(seed, rows, holes=0)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand((rows, P + R), generator=generator) < 0.5
    share = 0.2 + 0.6 * torch.rand(rows, generator=generator)
    return {**batch, "masked": drawn & batch["attention_mask"].bool(), "mask_share": share}


def split(batch: dict[str, torch.Tensor], shifted: bool, **options: Any) -> list[MicroBatch]:
    defaults = {"token_budget": 60, "multiple": 1, "count": int}
    diffusion = MaskedDiffusion(mask_token=MASK, shifted=shifted)
    return split_into_masked_versions(batch, diffusion, **(defaults | options), device=CPU)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**31 - 1),
    st.integers(1, 7),
    st.integers(3 * (P + R), 90),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_every_response_token_is_predicted_where_it_is_masked(
    seed: int, rows: int, budget: int, multiple: int, count: int, shifted: bool
) -> None:
    batch = masked(seed, rows)
    options = {"token_budget": budget, "multiple": multiple}
    micros = split(batch, shifted, **options, count=lambda own: own + count)
    assert [len(m.rows) for m in micros[-count:]] == [0] * count
    assert sorted(r for m in micros for r in m.rows.tolist()) == list(range(rows))
    for micro in micros:
        tokens, here = micro.tokens[0].tolist(), 0
        assert micro.num_tokens <= budget and len(tokens) % multiple == 0
        expected: Counter[tuple[int, int, int, int]] = Counter()
        weights: dict[tuple[int, int], list[float]] = {}
        bounds = []
        for local, row in enumerate(micro.rows.tolist()):
            columns = [c for c in range(P + R) if batch["attention_mask"][row, c]]
            share = float(batch["mask_share"][row])
            for version in range(3):
                bounds.append((here, here + len(columns)))
                assert micro.positions[0, here : here + len(columns)].tolist() == [
                    *range(len(columns))
                ]
                for place, column in enumerate(columns):
                    drawn = bool(batch["masked"][row, column])
                    hidden = drawn
                    if column >= P:
                        hidden = (True, drawn, not drawn)[version]
                    own = int(batch["input_ids"][row, column])
                    assert tokens[here + place] == (MASK if hidden else own)
                    if column >= P and hidden and batch["response_mask"][row, column - P]:
                        expected[here + place - shifted, own, local, column - P] += 1
                        factor = (1.0, 1 / share, 1 / (1 - share))[version] / 2
                        weights.setdefault((local, column - P), []).append(factor)
                here += len(columns)
        found = zip(
            *(x.tolist() for x in (micro.predictors, micro.targets, micro.row_of)),
            micro.column_of.tolist(),
            strict=True,
        )
        assert Counter(found) == expected
        # Each token once among all masks and once in either partial version.
        assert all(len(own) == 2 for own in weights.values())
        assert isinstance(micro.weights, torch.Tensor)
        summed = micro.to_rows(micro.weights)
        for (local, column), own in weights.items():
            assert float(summed[local, column]) == pytest.approx(sum(own), rel=1e-6)
        assert int((summed > 0).sum()) == len(weights)
        layout = micro.packed.layout
        assert not layout.causal and not layout.shares_prefix
        assert [(s.start, s.end) for s in layout.segments][: len(bounds)] == bounds


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31 - 1), st.integers(1, 7), st.integers(P + R, 40), st.booleans())
def test_a_single_version_predicts_its_masked_tokens_once(
    seed: int, rows: int, budget: int, shifted: bool
) -> None:
    batch = ragged(seed, rows, holes=0)
    batch["masked"], batch["mask_level"] = draw_denoising_masks(
        batch["attention_mask"], R, [seed + row for row in range(rows)]
    )
    assert not batch["masked"][:, :P].any()
    micros = split(batch, shifted, token_budget=budget)
    assert sorted(r for m in micros for r in m.rows.tolist()) == list(range(rows))
    for micro in micros:
        here, expected = 0, list[tuple[int, int, int, int]]()
        for local, row in enumerate(micro.rows.tolist()):
            columns = [c for c in range(P + R) if batch["attention_mask"][row, c]]
            for place, column in enumerate(columns):
                own, hidden = int(batch["input_ids"][row, column]), batch["masked"][row, column]
                assert int(micro.tokens[0, here + place]) == (MASK if hidden else own)
                if hidden and batch["response_mask"][row, column - P]:
                    expected.append((here + place - shifted, own, local, column - P))
            here += len(columns)
        parts = (micro.predictors, micro.targets, micro.row_of, micro.column_of)
        assert sorted(zip(*(x.tolist() for x in parts), strict=True)) == sorted(expected)
        levels = batch["mask_level"][micro.rows[micro.row_of]]
        assert torch.equal(torch.as_tensor(micro.weights), 1 / levels) and micro.occurrences == 1


def test_denoising_masks_depend_on_the_seed_and_mask_the_share_of_their_level() -> None:
    attended = torch.ones(400, 3 + 200, dtype=torch.int64)
    masked, levels = draw_denoising_masks(attended, 200, range(400))
    shares = masked[:, 3:].double().mean(dim=1)
    assert (shares - levels).abs().max() < 5 * (0.25 / 200) ** 0.5
    assert float(levels.min()) > 0 and float(levels.max()) <= 1
    assert abs(float(levels.mean()) - 0.5) < 0.06
    # Weights make every token count 1 in the mean.
    weighted = (masked[:, 3:] / levels[:, None]).mean()
    assert abs(float(weighted) - 1) < 0.05
    padded = torch.nn.functional.pad(attended[:5], (4, 7))
    again, same = draw_denoising_masks(padded, 207, range(5))
    assert torch.equal(again[:, 7:207], masked[:5, 3:]) and torch.equal(same, levels[:5])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"response_mask": [False, True, True, True]}, "row 0.*without gaps"),
        ({"attention_mask": [1] * 6 + [1, 0, 1, 1]}, "row 0.*without gaps"),
        ({"attention_mask": [1] * 6 + [1, 0, 0, 0]}, "row 0.*not attended"),
        ({"attention_mask": [0] * 6 + [1] * 4}, "row 0 has 4 response tokens but no prompt"),
    ],
)
def test_rows_that_cannot_be_scored_are_refused(change: dict[str, Any], named: str) -> None:
    batch = {
        "input_ids": torch.ones(1, P + R, dtype=torch.int64),
        "attention_mask": torch.ones(1, P + R, dtype=torch.int64),
        "response_mask": torch.ones(1, R, dtype=torch.bool),
        "masked": torch.ones(1, P + R, dtype=torch.bool),
        "mask_share": torch.tensor([0.5]),
    }
    split(batch, True)
    with pytest.raises(ValueError, match="30 tokens, more than the token budget of 29"):
        split(batch, True, token_budget=29)
    for name, row in change.items():
        batch[name] = torch.tensor([row]).to(batch[name].dtype)
    with pytest.raises(ValueError, match=named):
        split(batch, True)


@pytest.mark.parametrize("shifted", [False, True])
def test_mask_tokens_fill_a_canvas_and_are_predicted_nowhere(shifted: bool) -> None:
    batch = masked(5, 4)
    plain, filled = (split(batch, shifted, token_budget=200, canvas=size) for size in (0, R + 3))
    (one,), (other,) = plain, filled
    lengths = batch["attention_mask"].sum(dim=1)
    prompts = batch["attention_mask"][:, :P].sum(dim=1)
    assert other.num_tokens == int((3 * (prompts + R + 3)).sum())
    here = 0
    for row in other.rows.tolist():
        for _ in range(3):
            rest = slice(here + int(lengths[row]), here + int(prompts[row]) + R + 3)
            assert (other.tokens[0, rest] == MASK).all()
            here = rest.stop
    # What is predicted, and its weight, is the same.
    assert isinstance(one.weights, torch.Tensor) and isinstance(other.weights, torch.Tensor)
    for micro in (one, other):
        assert sorted(micro.rows.tolist()) == [0, 1, 2, 3]
    sums = [m.to_rows(m.weights)[m.rows.argsort()] for m in (one, other)]
    assert torch.equal(*sums) and len(one.targets) == len(other.targets)
