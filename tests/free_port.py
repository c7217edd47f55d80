"""A port of loopback for a rendezvous."""

from __future__ import annotations

import random
import socket
from contextlib import closing

_BELOW_EPHEMERAL = range(20_000, 32_000)


def free_port() -> int:
    """A free port below the range from which the system chooses ports of outgoing connections,
    which could take it before the rendezvous has begun.
    """
    for port in random.SystemRandom().sample(_BELOW_EPHEMERAL, 100):
        with closing(socket.socket()) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")
