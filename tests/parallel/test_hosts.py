from __future__ import annotations

import pytest

from ctrl_megatron.parallel.hosts import Hosts, host_identity, number_hosts
from ctrl_megatron.parallel.layout import Layout


def test_hosts_are_numbered_by_their_lowest_rank() -> None:
    hosts = number_hosts([("east", 1), ("west", 1), ("east", 1), ("west", 2)])
    assert hosts == Hosts(names=("east", "west", "west"), of_rank=(0, 1, 0, 2))
    assert [hosts.first_rank(host) for host in range(3)] == [0, 1, 3]


def test_this_process_and_its_neighbour_are_on_one_host() -> None:
    assert number_hosts([host_identity(), host_identity()]).of_rank == (0, 0)


@pytest.mark.parametrize(
    ("layout", "per_host", "with_leaders"),
    [
        (Layout(tensor=8, pipeline=8), 8, (0,)),
        (Layout(tensor=8, pipeline=4, data=2), 8, (0, 1)),
        (Layout(tensor=8, data=8), 8, tuple(range(8))),
        (Layout(tensor=2, pipeline=2, data=4), 4, (0, 1)),
        (Layout(pipeline=2, data=2), 2, (0,)),
        (Layout(tensor=2, pipeline=2, data=2), 8, (0,)),
    ],
)
def test_a_host_with_a_leader_begins_with_one(
    layout: Layout, per_host: int, with_leaders: tuple[int, ...]
) -> None:
    hosts = number_hosts([("h", rank // per_host) for rank in range(layout.world_size)])
    hosts.require_whole_tensor_groups(layout)
    assert hosts.with_leaders(layout) == with_leaders
    for host in range(len(hosts.names)):
        place = layout.coordinates(hosts.first_rank(host))
        assert (place.tp == 0 and place.pp == 0) == (host in with_leaders)


def test_a_torn_tensor_group_is_named_with_its_hosts() -> None:
    hosts = number_hosts([("east", 0), ("east", 0), ("east", 0), ("west", 0)])
    with pytest.raises(ValueError, match=r"ranks \[2, 3\] on several hosts \(east, west\); choose"):
        hosts.require_whole_tensor_groups(Layout(tensor=2, data=2))
