"""Token-budget packing against a brute-force optimum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.data.packing import pack_by_length

BUDGET = 20
lengths_lists = st.lists(st.integers(1, BUDGET), max_size=40)


def fewest_groups(lengths: list[int], budget: int) -> int:
    """By trying every way to put each item into an open group or a new one."""
    best = len(lengths)

    def place(index: int, loads: list[int]) -> None:
        nonlocal best
        if len(loads) >= best:
            return
        if index == len(lengths):
            best = len(loads)
            return
        for slot in range(len(loads)):
            if loads[slot] + lengths[index] <= budget:
                loads[slot] += lengths[index]
                place(index + 1, loads)
                loads[slot] -= lengths[index]
        place(index + 1, [*loads, lengths[index]])

    place(0, [])
    return best


@given(lengths_lists)
def test_every_item_once_and_no_group_above_the_budget(lengths: list[int]) -> None:
    groups = pack_by_length(lengths, BUDGET)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(group for group in groups)
    assert all(sum(lengths[i] for i in group) <= BUDGET for group in groups)


@given(st.lists(st.integers(1, BUDGET), max_size=8))
def test_close_to_the_fewest_groups(lengths: list[int]) -> None:
    """11/9 of the optimum + 6/9 (Dósa 2007)."""
    assert 9 * len(pack_by_length(lengths, BUDGET)) <= 11 * fewest_groups(lengths, BUDGET) + 6


@given(lengths_lists)
def test_no_two_groups_fit_into_one(lengths: list[int]) -> None:
    loads = sorted(sum(lengths[i] for i in group) for group in pack_by_length(lengths, BUDGET))
    assert len(loads) < 2 or loads[0] + loads[1] > BUDGET


@given(lengths_lists)
def test_longest_first_and_equal_lengths_in_order(lengths: list[int]) -> None:
    groups = pack_by_length(lengths, BUDGET)
    opening = [lengths[group[0]] for group in groups]
    assert opening == sorted(opening, reverse=True)
    for group in groups:
        assert group == sorted(group, key=lambda i: (-lengths[i], i))


def test_a_known_packing() -> None:
    assert pack_by_length([6, 4, 3, 7, 10, 4], 10) == [[4], [3, 2], [0, 1], [5]]
    assert pack_by_length([], 10) == []


def test_packing_errors() -> None:
    with pytest.raises(ValueError, match=r"item 1 has 11 tokens, more than .* budget of 10"):
        pack_by_length([3, 11], 10)
    with pytest.raises(ValueError, match=r"actor\.ppo_max_token_len_per_gpu of 10"):
        pack_by_length([11], 10, key="actor.ppo_max_token_len_per_gpu")
    with pytest.raises(ValueError, match="item 0 has 0 tokens"):
        pack_by_length([0], 10)
