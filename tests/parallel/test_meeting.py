"""Ranks that are started again meet each other, not what earlier ranks have left in the store."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import psutil
import pytest
import torch.distributed as dist
from free_port import free_port
from hypothesis import given, settings
from hypothesis import strategies as st
from listening import listening

from ctrl_megatron.config.environment import Launch
from ctrl_megatron.parallel.meeting import agree_on_meeting_name, rendezvous

SECONDS = timedelta(seconds=10)


@settings(max_examples=10)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_every_start_of_the_ranks_meets_under_a_name_of_its_own(sizes: list[int]) -> None:
    store = dist.HashStore()
    names: list[str] = []
    for size in sizes:
        # Rank 0 comes last, so that the others find the meeting of the start before.
        with ThreadPoolExecutor(size) as ranks:
            one = partial(agree_on_meeting_name, store, world_size=size, timeout=SECONDS)
            met = list(ranks.map(one, reversed(range(size))))
        assert len(set(met)) == 1
        names.append(met[0])
    assert len(set(names)) == len(sizes)


def test_a_rank_without_rank_0_waits_no_longer_than_the_time_out() -> None:
    store = dist.HashStore()
    agree_on_meeting_name(store, 0, 1, SECONDS)
    with pytest.raises(dist.DistStoreError, match="rank 1 has not met rank 0"):
        agree_on_meeting_name(store, 1, 2, timedelta(seconds=0.2))


def test_ranks_whose_launcher_has_ended_do_not_wait_for_its_store() -> None:
    launch = Launch("torchrun", 0, 2, 0, 2, "127.0.0.1", free_port(), has_store=True)
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="has the launcher ended"):
        rendezvous(launch, timedelta(minutes=30))
    assert time.monotonic() - began < 20


def test_what_ranks_of_one_host_open_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    # Its own name leads nowhere, as srun's list of nodes may.
    launch = Launch("slurm", 0, 1, 0, 1, "nowhere.invalid", free_port())
    began, before = time.monotonic(), listening([psutil.Process()])
    met = rendezvous(launch, SECONDS)
    opened = listening([psutil.Process()]).keys() - before.keys()
    assert opened == {f"127.0.0.1:{launch.master_port}"} and met["rank"] == 0
    assert time.monotonic() - began < 5
    assert [os.environ[name] for name in names] == ["lo", "lo"]
    monkeypatch.setenv(names[0], "ib0")
    rendezvous(Launch("single", 0, 1, 0, 1, "127.0.0.1", 0), SECONDS)
    assert os.environ[names[0]] == "ib0"
