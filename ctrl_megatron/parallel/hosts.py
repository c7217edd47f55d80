"""Which ranks share a host, and with it memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product

from ctrl_megatron.parallel.layout import Layout

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a run, numbered by their lowest rank."""

    names: tuple[str, ...]
    of_rank: tuple[int, ...]
    """Every rank's host."""

    def first_rank(self, host: int) -> int:
        """The host's lowest rank, which acts for it. It is a leader if any rank of the host is."""
        return self.of_rank.index(host)

    def with_leaders(self, layout: Layout) -> tuple[int, ...]:
        """The hosts on which somebody speaks to an engine, in ascending order."""
        leaders = (layout.rank(tp=0, pp=0, dp=dp) for dp in range(layout.data))
        return tuple(sorted({self.of_rank[rank] for rank in leaders}))

    def require_whole_tensor_groups(self, layout: Layout) -> None:
        """ValueError if tensor-parallel ranks of one group stand on several hosts."""
        for pp, dp in product(range(layout.pipeline), range(layout.data)):
            ranks = [layout.rank(tp=tp, pp=pp, dp=dp) for tp in range(layout.tensor)]
            hosts = sorted({self.of_rank[rank] for rank in ranks})
            if len(hosts) > 1:
                names = ", ".join(self.names[host] for host in hosts)
                raise ValueError(
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
