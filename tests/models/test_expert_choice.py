"""The choice of experts in groups against one token after the other in plain Python."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.models.expert_choice import group_limited_topk
from ctrl_megatron.models.shape import GroupLimitedRouting


@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(1, 5),
    size=st.integers(2, 4),
    chosen=st.integers(1, 5),
    best=st.integers(1, 2),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_a_token_chooses_in_the_groups_with_the_best_scores(
    groups: int, size: int, chosen: int, best: int, seed: int, data: st.DataObject
) -> None:
    chosen = min(chosen, groups)
    top_k = data.draw(st.integers(1, chosen * size))
    # Scores plus a bias may be negative.
    scores = torch.randn(7, groups * size, generator=torch.Generator().manual_seed(seed))
    choice = GroupLimitedRouting(groups=groups, chosen=chosen, best=best)
    values, numbers = group_limited_topk(scores, top_k, choice)
    for row, own, found in zip(scores.tolist(), numbers.tolist(), values.tolist(), strict=True):
        members = [range(g * size, (g + 1) * size) for g in range(groups)]
        members.sort(key=lambda group: sum(sorted((row[e] for e in group), reverse=True)[:best]))
        allowed = [expert for group in members[groups - chosen :] for expert in group]
        want = sorted(allowed, key=row.__getitem__, reverse=True)[:top_k]
        assert own == want
        assert found == [row[expert] for expert in want]
