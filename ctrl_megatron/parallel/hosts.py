"""Which ranks share a host, and with it memory, and how hosts reach each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ctrl_megatron.errors import UserError
from ctrl_megatron.parallel.layout import Layout

SHARED_MEMORY = "/dev/shm"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Two IP addresses between which the system would send."""

    own: str
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a run, numbered by their lowest rank."""

    names: tuple[str, ...]
    of_rank: tuple[int, ...]
    """Every rank's host."""
    addresses: tuple[str, ...] = ()
    """IP address of each host by which the others reach it; loopback where there is only one."""

    def first_rank(self, host: int) -> int:
        """The host's lowest rank, which acts for it."""
        return self.of_rank.index(host)

    def ranks_on(self, host: int) -> int:
        """How many ranks the host has."""
        return self.of_rank.count(host)

    def reached(self, ways: Sequence[Way]) -> Hosts:
        """With ``addresses``, from every rank's way to rank 0's host.

        A name often leads to loopback on the machine that bears it, so rank 0's host is known by
        what the others reach it by.
        """
        first = [self.first_rank(host) for host in range(len(self.names))]
        if len(first) == 1:
            return replace(self, addresses=(LOOPBACK,))
        others = tuple(ways[rank].own for rank in first[1:])
        return replace(self, addresses=(ways[first[1]].peer, *others))

    def require_whole_tensor_groups(self, layout: Layout) -> None:
        """ValueError if tensor-parallel ranks of one group stand on several hosts."""
        for pp, dp in product(range(layout.pipeline), range(layout.data)):
            ranks = [layout.rank(tp=tp, pp=pp, dp=dp) for tp in range(layout.tensor)]
            hosts = sorted({self.of_rank[rank] for rank in ranks})
            if len(hosts) > 1:
                names = ", ".join(self.names[host] for host in hosts)
                raise UserError(
                    f"tensor_model_parallel_size={layout.tensor} puts ranks {ranks} on several "
                    f"hosts ({names}); choose a size that divides the ranks of a host, and a "
                    "larger pipeline_model_parallel_size where the model needs it"
                )


def number_hosts(identities: Sequence[tuple[str, Hashable]]) -> Hosts:
    """Hosts from one (name, what tells hosts of that name apart) per rank."""
    numbers = {identity: number for number, identity in enumerate(dict.fromkeys(identities))}
    return Hosts(
        names=tuple(name for name, _ in numbers),
        of_rank=tuple(numbers[identity] for identity in identities),
    )


def host_identity() -> tuple[str, int]:
    """This process's host, for ``number_hosts``. Containers with a shared memory of their own are
    hosts of their own."""
    return socket.gethostname(), os.stat(SHARED_MEMORY).st_dev


def way_to(host: str) -> Way:
    """This process's way to ``host``, a name or an address; nothing is sent."""
    family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(place)
        return Way(own=way.getsockname()[0], peer=way.getpeername()[0])
