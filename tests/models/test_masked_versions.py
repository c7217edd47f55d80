"""Micro-batches of masked versions against the definition of the coupled score, token by token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_micro_batch import CPU, P, R, ragged

from ctrl_megatron.models.masked_versions import split_into_masked_versions
from ctrl_megatron.models.micro_batch import MicroBatch
from ctrl_megatron.models.shape import MaskedDiffusion

MASK = 99


def masked(seed: int, rows: int) -> dict[str, torch.Tensor]:
    batch = ragged(seed, rows)
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
        assert not layout.causal and not layout.shares
        assert [(s.start, s.end) for s in layout.segments][: len(bounds)] == bounds


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
