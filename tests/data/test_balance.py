"""Number partitioning against brute force and its provable bounds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.data.balance import partition_by_cost, partition_groups

costs_lists = st.lists(st.integers(0, 50), max_size=24)
parts_counts = st.integers(1, 6)


def sums(costs: Sequence[float], parts: list[list[int]]) -> list[float]:
    return [sum(costs[i] for i in part) for part in parts]


def best_possible(costs: Sequence[int], k: int) -> int:
    """The least possible maximum, over all assignments to parts of equal size."""
    best = sum(costs)
    for owners in product(range(k), repeat=len(costs)):
        if len({owners.count(part) for part in range(k)}) > 1:
            continue
        loads = [0] * k
        for owner, cost in zip(owners, costs, strict=True):
            loads[owner] += cost
        best = min(best, max(loads))
    return best


@given(costs_lists, parts_counts)
def test_every_item_is_in_one_part(costs: list[int], k: int) -> None:
    costs = costs[: len(costs) // k * k]
    parts = partition_by_cost(costs, k)
    assert [len(part) for part in parts] == [len(costs) // k] * k
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)


@given(st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), max_size=8))
def test_equal_sizes(triples: list[list[int]]) -> None:
    costs = [cost for triple in triples for cost in triple]
    parts = partition_by_cost(costs, 3)
    assert [len(part) for part in parts] == [len(triples)] * 3
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    loads = sums(costs, parts)
    descending = sorted(costs, reverse=True)
    blocks = [descending[i : i + 3] for i in range(0, len(costs), 3)]
    assert max(loads) - min(loads) <= max((b[0] - b[-1] for b in blocks), default=0)


@given(st.lists(st.integers(1, 30), min_size=4, max_size=8).filter(lambda c: len(c) % 2 == 0))
def test_equal_sizes_stay_below_twice_the_optimum(costs: list[int]) -> None:
    load = max(sums(costs, partition_by_cost(costs, 2)))
    assert load <= 2 * best_possible(costs, 2)


def test_it_is_better_than_dealing_in_turn() -> None:
    costs = [100, 1, 1, 1, 100, 1, 1, 1]
    loads = sums(costs, partition_by_cost(costs, 4))
    assert sorted(loads) == [2, 2, 101, 101]
    assert sums(costs, partition_by_cost(costs, 2)) == [103, 103]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from("abcdefgh")), max_size=24), parts_counts
)
def test_groups_stay_together(items: list[tuple[int, str]], k: int) -> None:
    names = sorted({group for _, group in items})
    kept = names[: len(names) // k * k]
    items = [(cost, group) for cost, group in items if group in kept]
    costs, groups = [cost for cost, _ in items], [group for _, group in items]
    parts = partition_groups(costs, groups, k)
    assert sorted(i for part in parts for i in part) == list(range(len(items)))
    owners = [{groups[i] for i in part} for part in parts]
    assert sum(map(len, owners)) == len(set(groups))
    totals = [sum(c for c, g in items if g == group) for group in set(groups)]
    loads = sums(costs, parts)
    assert max(loads) - min(loads) <= max(totals, default=0)


@given(st.permutations(["a"] * 3 + ["b"] * 2 + ["c"] * 4 + ["d"]))
def test_equal_numbers_of_groups(groups: list[str]) -> None:
    parts = partition_groups([1.0] * len(groups), groups, 2)
    assert [len({groups[i] for i in part}) for part in parts] == [2, 2]
    # The four groups weigh 4, 3, 2 and 1: heaviest with lightest.
    assert [len(part) for part in parts] == [5, 5]


@given(costs_lists, parts_counts)
def test_the_result_depends_on_the_arguments_alone(costs: list[int], k: int) -> None:
    costs = costs[: len(costs) // k * k]
    assert partition_by_cost(costs, k) == partition_by_cost([float(c) for c in costs], k)


def test_balance_errors() -> None:
    with pytest.raises(ValueError, match="3 items cannot be shared in 2 parts of equal size"):
        partition_by_cost([1, 2, 3], 2)
    with pytest.raises(ValueError, match="3 items cannot be shared"):
        partition_groups([1, 1, 2, 3], "aabc", 2)
    for cost in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="item 1 costs"):
            partition_by_cost([1, cost], 1)
    with pytest.raises(ValueError, match="positive"):
        partition_by_cost([1], 0)
    with pytest.raises(ValueError, match=r"zip\(\)"):
        partition_groups([1, 2], "a", 1)
