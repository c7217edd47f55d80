"""The hosts of a run: which ranks share one, and its memory, and the hosts' addresses."""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ctrl_megatron.errors import UserError
from ctrl_megatron.parallel.layout import Axis, Layout

SHARED_MEMORY = "/dev/shm"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionAddresses:
    """The IP addresses of both ends of a connection, as the system would choose them."""

    own: str
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a run, numbered by their lowest rank."""

    names: tuple[str, ...]
    of_rank: tuple[int, ...]
    """Every rank's host."""
    addresses: tuple[str, ...] = ()
    """The IP address at which the others reach each host; loopback for a single host."""

    def first_rank(self, host: int) -> int:
        """The host's lowest rank, which acts for the host."""
        return self.of_rank.index(host)

    def ranks_on(self, host: int) -> int:
        return self.of_rank.count(host)

    def restricted_to_ranks(self, ranks: Sequence[int]) -> Hosts:
        """The hosts of some ranks, which are numbered from 0, as are the hosts."""
        kept = list(dict.fromkeys(self.of_rank[rank] for rank in ranks))
        return Hosts(
            names=tuple(self.names[host] for host in kept),
            of_rank=tuple(kept.index(self.of_rank[rank]) for rank in ranks),
            addresses=tuple(self.addresses[host] for host in kept) if self.addresses else (),
        )

    def with_addresses(self, ways: Sequence[ConnectionAddresses]) -> Hosts:
        """These hosts with their ``addresses``, which are found from the ``ways`` of every rank to
        rank 0's host. A machine often resolves its own name to loopback, so the address of rank 0's
        host is the one that the other hosts use."""
        first = [self.first_rank(host) for host in range(len(self.names))]
        if len(first) == 1:
            return replace(self, addresses=(LOOPBACK,))
        others = tuple(ways[rank].own for rank in first[1:])
        return replace(self, addresses=(ways[first[1]].peer, *others))

    def require_tensor_groups_within_host(self, layout: Layout) -> None:
        """ValueError if the ranks that split one weight are on several hosts."""
        axes: tuple[tuple[Axis, str], ...] = (
            ("tp", "tensor_model_parallel_size"),
            ("etp", "expert_tensor_parallel_size"),
        )
        for axis, key in axes:
            for group in dict.fromkeys(
                layout.ranks_along(r, axis) for r in range(layout.world_size)
            ):
                hosts = sorted({self.of_rank[rank] for rank in group})
                if len(hosts) > 1:
                    names = ", ".join(self.names[host] for host in hosts)
                    raise UserError(
                        f"{key}={len(group)} puts ranks {list(group)} on several hosts ({names}); "
                        "choose a size that divides the ranks of a host, and a larger "
                        "pipeline_model_parallel_size where the model needs it"
                    )


def hosts_from_identities(identities: Sequence[tuple[str, Hashable]]) -> Hosts:
    """Hosts from one (name, what distinguishes hosts of that name) per rank."""
    numbers = {identity: number for number, identity in enumerate(dict.fromkeys(identities))}
    return Hosts(
        names=tuple(name for name, _ in numbers),
        of_rank=tuple(numbers[identity] for identity in identities),
    )


def own_segment_prefix() -> str:
    """How names that this process makes in ``SHARED_MEMORY`` begin: with its id and the namespace
    inside which ids are unique, so that others recognise what a killed process has left.
    """
    return f"ctrl-{os.getpid()}-{pid_namespace()}-"


def pid_namespace() -> int:
    """The namespace inside which process ids are unique."""
    return os.stat("/proc/self/ns/pid").st_ino


def host_identity() -> tuple[str, int]:
    """The identity of this process's host, for ``hosts_from_identities``. A container with its own
    shared memory counts as another host."""
    return socket.gethostname(), os.stat(SHARED_MEMORY).st_dev


def connection_addresses_to(host: str) -> ConnectionAddresses:
    """This process's way to ``host``, a name or an address; sends nothing."""
    family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(place)
        return ConnectionAddresses(own=way.getsockname()[0], peer=way.getpeername()[0])


def free_ports(address: str, count: int) -> list[int]:
    """Different ports of this host's ``address`` at which nothing listens now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with ExitStack() as stack:
        taken = [
            stack.enter_context(socket.create_server((address, 0), family=family))
            for _ in range(count)
        ]
        return [own.getsockname()[1] for own in taken]
