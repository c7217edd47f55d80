"""Where the ranks of a run meet: a store for the keys of this start alone.

A launcher that starts ranks again keeps its store, with the addresses of ranks that are gone and
the reason for which they ended.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ctrl_megatron.config.environment import Launch, bind_collectives_to_loopback, read_run_key
from ctrl_megatron.parallel.hosts import LOOPBACK
from ctrl_megatron.parallel.signed_objects import install_object_signing
from ctrl_megatron.parallel.store import SingleAddressTCPStore

_POLL_SECONDS = 0.05
_REFUSED_SECONDS = 5.0


def rendezvous(launch: Launch, timeout: timedelta) -> dict[str, Any]:
    """The rendezvous of the ranks, as arguments of ``init_process_group``. Collective.

    torchrun serves a store; with every other launcher rank 0 serves one. What the ranks of one host
    open from now on listens on loopback, and where the run has a key the objects that ranks send
    are signed. Raises torch's DistStoreError if a rank does not come within ``timeout``, and soon
    if the launcher that serves the store has ended.
    """
    if key := read_run_key():
        install_object_signing(key)
    address = launch.master_addr
    if launch.has_store:
        _require_store(address, launch.master_port)
    if launch.local_world_size == launch.world_size:
        bind_collectives_to_loopback()
        address = address if launch.has_store else LOOPBACK
    store: Any = SingleAddressTCPStore(
        address,
        launch.master_port,
        launch.world_size,
        is_master=launch.rank == 0 and not launch.has_store,
        timeout=timeout,
    )
    name = agree_on_meeting_name(store, launch.rank, launch.world_size, timeout)
    own = dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]
    return {"store": own, "rank": launch.rank, "world_size": launch.world_size}


def _require_store(address: str, port: int) -> None:
    """Raise DistStoreError where nothing listens at the launcher's store, which was there before
    the ranks: torch would try again until its time-out, minutes after the launcher has ended.
    """
    deadline = time.monotonic() + _REFUSED_SECONDS
    while True:
        try:
            socket.create_connection((address, port), _REFUSED_SECONDS).close()
            return
        except ConnectionRefusedError as error:
            if time.monotonic() > deadline:
                raise dist.DistStoreError(
                    f"the launcher's store at {address}:{port} is gone; has the launcher ended?"
                ) from error
            time.sleep(_POLL_SECONDS)
        except OSError:
            return  # torch tries again, and names what it meets


def agree_on_meeting_name(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """A new name that all ranks agree on, whatever earlier ranks have left in the store.

    Collective. Rank 0 names the meeting, every other rank signs it with a word of its own, and rank
    0 confirms the words; so a rank recognises a meeting that is not its own.
    """
    word, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        signed = [f"{word}/{other}" for other in range(1, world_size)]
        store.set("meeting", word)
        if signed:
            store.wait(signed, timeout)
        store.set(f"{word}/confirmed", json.dumps([store.get(key).decode() for key in signed]))
        return word
    while True:
        name = store.get("meeting").decode()
        store.set(f"{name}/{rank}", word)
        confirmed = f"{name}/confirmed"
        if store.check([confirmed]) and word in json.loads(store.get(confirmed)):
            return name
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"rank {rank} has not met rank 0 within {timeout}")
        time.sleep(_POLL_SECONDS)
