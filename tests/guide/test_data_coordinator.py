"""The coordinator of samples: order, filters, redistributions, balance."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.guide.data_coordinator import (
    DataCoordinator,
    SampleInfo,
    key_filter,
    node_filter,
    workload,
)


def infos(tokens: Sequence[int], *, key: str = "", group: int = 1) -> list[SampleInfo]:
    return [
        SampleInfo(
            sum_tokens=size, uid=f"{n // group}" if group > 1 else "", dict_info={"key": key}
        )
        for n, size in enumerate(tokens)
    ]


def test_a_sample_is_known_by_the_guides_defaults() -> None:
    info = SampleInfo()
    assert (info.sum_tokens, info.prompt_length, info.response_length) == (0, 0, 0)
    assert (info.uid, info.node_id, info.dict_info) == ("", None, {})


def test_samples_come_in_their_order_and_all_or_none() -> None:
    box: DataCoordinator[str] = DataCoordinator(1, 2, 2)
    assert box.put_batch(infos([1, 1]), ["a", "b"], "host0") == 2
    assert box.put_batch(infos([1]), ["c"]) == 3
    assert box.get_batch(4) == [] and len(box) == 3
    assert box.get_batch(2) == ["a", "b"] and len(box) == 1
    assert box.get_batch(1) == ["c"] and box.get_batch(1) == []


def test_filters_are_a_conjunction_and_leave_the_others() -> None:
    box: DataCoordinator[str] = DataCoordinator()
    mine = infos([5, 9], key="train")
    mine[1].node_id = "host1"
    box.put_batch([*mine, *infos([7], key="values")], ["a", "b", "c"], "host0")
    both = [key_filter("train"), node_filter("host1")]
    assert box.get_batch(2, filter_plugin=both) == [] and len(box) == 3
    assert box.get_batch(1, filter_plugin=both) == ["b"]
    assert box.get_batch(1, filter_plugin=key_filter("values")) == ["c"]
    assert box.get_batch(1, filter_plugin=node_filter("host0")) == ["a"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"batch_size": 0}, "positive batch_size"),
        ({"batch_size": 1, "dp_rank": 2, "balance_partitions": 2}, "dp_rank below 2"),
        ({"batch_size": 3}, "end inside the group '1'"),
        ({"batch_size": 2, "balance_partitions": 3}, None),
        ({"batch_size": 1, "balance_partitions": 4}, "cannot be shared"),
    ],
)
def test_what_cannot_be_shared_changes_nothing(call: dict[str, Any], said: str | None) -> None:
    box: DataCoordinator[int] = DataCoordinator()
    box.put_batch(infos([3] * 6, group=2), range(6))
    if said is None:
        assert len(box.get_batch(**call)) == 2
        return
    with pytest.raises(ValueError, match=said):
        box.get_batch(**call)
    assert len(box) == 6


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 4000), min_size=4, max_size=12).map(lambda n: n[: len(n) // 4 * 4]),
    st.integers(1, 4),
    st.permutations(range(4)),
)
def test_redistributions_lose_nothing_and_keep_groups_whole(
    lengths: list[int], group: int, asking: list[int]
) -> None:
    """Between nodes with 4, 2, 4 and 1 data ranks, keyed by node, ranks asking in any order."""
    box: DataCoordinator[int] = DataCoordinator()
    sizes = [length + n for length in lengths for n in range(group)]
    uids = [n // group for n in range(len(sizes))]
    shares = [[n for n in range(len(sizes)) if uids[n] % 4 == rank] for rank in range(4)]
    for step, ranks in enumerate((4, 2, 4, 1)):
        for share in shares:
            given = [
                SampleInfo(sum_tokens=sizes[n], uid=str(uids[n]), dict_info={"key": str(step)})
                for n in share
            ]
            box.put_batch(given, share)
        order = [rank for rank in asking if rank < ranks]
        part = len(sizes) // ranks
        wanted = key_filter(str(step))
        got = {
            rank: box.get_batch(part, rank, filter_plugin=wanted, balance_partitions=ranks)
            for rank in order
        }
        shares = [got[rank] for rank in range(ranks)]
        assert sorted(n for share in shares for n in share) == list(range(len(sizes)))
        owners: dict[int, set[int]] = {}
        for rank, share in enumerate(shares):
            for n in share:
                owners.setdefault(uids[n], set()).add(rank)
        assert all(len(found) == 1 for found in owners.values())
    assert len(box) == 0


def lognormal(count: int) -> list[int]:
    draw = random.Random(5)
    return [round(500 * draw.lognormvariate(0, 1)) + 1 for _ in range(count)]


def largest_over_mean(tokens: Sequence[int], partitions: int, group: int = 1) -> float:
    box: DataCoordinator[int] = DataCoordinator()
    box.put_batch(infos(tokens, group=group), range(len(tokens)))
    size = len(tokens) // partitions
    sums = [
        sum(workload(tokens[n]) for n in box.get_batch(size, rank, balance_partitions=partitions))
        for rank in range(partitions)
    ]
    return max(sums) * partitions / sum(sums)


def test_4096_lognormal_lengths_are_balanced_over_64_partitions() -> None:
    tokens = lognormal(4096)
    began = time.process_time()
    assert largest_over_mean(tokens, 64) <= 1.02
    assert time.process_time() - began < 0.5
    assert largest_over_mean(tokens, 64, group=8) <= 1.02


def test_short_samples_are_at_both_ends_of_a_share() -> None:
    box: DataCoordinator[int] = DataCoordinator()
    tokens = lognormal(64)
    box.put_batch(infos(tokens), range(64))
    share = [tokens[n] for n in box.get_batch(32, 1, balance_partitions=2)]
    peak = share.index(max(share))
    assert share[: peak + 1] == sorted(share[: peak + 1])
    assert share[peak:] == sorted(share[peak:], reverse=True)
    assert 10 < peak < 22


@pytest.mark.long
def test_1024_ranks_of_64_samples_take_seconds_and_little_memory() -> None:
    tokens = lognormal(1024 * 64)

    def deal() -> int:
        box: DataCoordinator[int] = DataCoordinator()
        box.put_batch(infos(tokens, group=8), range(len(tokens)))
        return sum(len(box.get_batch(64, rank, balance_partitions=1024)) for rank in range(1024))

    began = time.process_time()
    assert deal() == len(tokens)
    took = time.process_time() - began
    # Counting every allocation makes the same work several times slower.
    tracemalloc.start()
    assert deal() == len(tokens)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 5 and peak < 200e6, (took, peak)
