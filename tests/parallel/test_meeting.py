"""Ranks that are started again meet each other, not what earlier ranks have left in the store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from free_port import free_port
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.config.environment import Launch
from ctrl_megatron.parallel.meeting import meet, rendezvous

SECONDS = timedelta(seconds=10)


@settings(max_examples=10)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_every_start_of_the_ranks_meets_under_a_name_of_its_own(sizes: list[int]) -> None:
    store = dist.HashStore()
    names: list[str] = []
    for size in sizes:
        # Rank 0 comes last, so that the others find the meeting of the start before.
        with ThreadPoolExecutor(size) as ranks:
            met = list(ranks.map(lambda r: meet(store, r, size, SECONDS), reversed(range(size))))  # noqa: B023
        assert len(set(met)) == 1
        names.append(met[0])
    assert len(set(names)) == len(sizes)


def test_a_rank_without_rank_0_waits_no_longer_than_the_time_out() -> None:
    store = dist.HashStore()
    meet(store, 0, 1, SECONDS)
    with pytest.raises(dist.DistStoreError, match="rank 1 has not met rank 0"):
        meet(store, 1, 2, timedelta(seconds=0.2))


def test_ranks_whose_launcher_has_ended_do_not_wait_for_its_store() -> None:
    launch = Launch("torchrun", 0, 2, 0, 2, "127.0.0.1", free_port(), has_store=True)
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="has the launcher ended"):
        rendezvous(launch, timedelta(minutes=30))
    assert time.monotonic() - began < 20
