"""The groups that have a learning signal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.algorithms import compute_grpo_outcome_advantage, rows_in_varied_groups

rows = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.1, 1.0])), max_size=12)


@given(rows)
def test_groups_with_signal_equal_plain_python(found: list[tuple[str, float]]) -> None:
    groups, scores = [g for g, _ in found], torch.tensor([s for _, s in found])
    values = {g: {s for h, s in found if h == g} for g in groups}
    kept = rows_in_varied_groups(scores, groups)
    assert kept.tolist() == [len(values[g]) > 1 for g in groups]
    if found:
        ones = torch.ones(len(found), 1)
        advantages, _ = compute_grpo_outcome_advantage(scores[:, None], ones, groups)
        sizes = torch.tensor([groups.count(g) for g in groups])
        silent = ~kept & (sizes > 1)
        assert torch.all(advantages[silent].abs() < 1e-6)


def test_scores_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="row 1 is NaN"):
        rows_in_varied_groups(torch.tensor([0.0, float("nan")]), [0, 0])
    with pytest.raises(ValueError, match="1 group ids for 2 rows"):
        rows_in_varied_groups(torch.zeros(2), [0])
