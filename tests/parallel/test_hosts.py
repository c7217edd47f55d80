from __future__ import annotations

import pytest

from ctrl_megatron.parallel.hosts import (
    ConnectionAddresses,
    Hosts,
    connection_addresses_to,
    host_identity,
    hosts_from_identities,
)
from ctrl_megatron.parallel.layout import Layout


def test_hosts_are_numbered_by_their_lowest_rank() -> None:
    hosts = hosts_from_identities([("east", 1), ("west", 1), ("east", 1), ("west", 2)])
    assert hosts == Hosts(names=("east", "west", "west"), of_rank=(0, 1, 0, 2))
    assert [hosts.first_rank(host) for host in range(3)] == [0, 1, 3]


def test_this_process_and_its_neighbour_are_on_one_host() -> None:
    assert hosts_from_identities([host_identity(), host_identity()]).of_rank == (0, 0)


def test_a_host_is_known_by_the_address_that_others_reach() -> None:
    """Rank 0's own name often resolves to loopback on its own host."""
    hosts = hosts_from_identities(
        [("east", 0), ("east", 0), ("west", 0), ("south", 0), ("south", 0)]
    )
    ways = [
        *[ConnectionAddresses(own="127.0.0.1", peer="127.0.1.1")] * 2,
        *(ConnectionAddresses(own=f"10.0.0.{n}", peer="10.0.0.1") for n in (2, 3, 3)),
    ]
    assert hosts.with_addresses(ways).addresses == ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert [hosts.ranks_on(host) for host in range(3)] == [2, 1, 2]


def test_one_host_stays_on_loopback() -> None:
    alone = hosts_from_identities([("east", 0), ("east", 0)])
    assert alone.with_addresses([]).addresses == ("127.0.0.1",)
    assert connection_addresses_to("localhost") == ConnectionAddresses(
        own="127.0.0.1", peer="127.0.0.1"
    )


def test_a_torn_tensor_group_is_named_with_its_hosts() -> None:
    hosts = hosts_from_identities([("east", 0), ("east", 0), ("east", 0), ("west", 0)])
    with pytest.raises(ValueError, match=r"ranks \[2, 3\] on several hosts \(east, west\); choose"):
        hosts.require_tensor_groups_within_host(Layout(tensor=2, data=2))
