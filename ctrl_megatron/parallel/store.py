"""torch's key-value store, served at one address.

torch binds a store to all addresses of the machine, whatever address it is given, and a store
answers everybody.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from importlib import import_module
from typing import Any

import torch.distributed as dist

from ctrl_megatron.parallel.hosts import LOOPBACK

_log = logging.getLogger(__name__)
_TORCHS: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]


class SingleAddressTCPStore(_TORCHS):
    """``TCPStore`` whose server listens at ``host_name``'s address only, ``localhost``'s at
    127.0.0.1.

    It listens at all addresses where a machine's own name leads to loopback, as on many, or its
    address belongs to a router: other hosts reach it at an address that it does not know.
    """

    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, *given: Any, **named: Any
    ) -> None:
        host = LOOPBACK if host_name == "localhost" else host_name
        serves = given[0] if given else named.get("is_master", False)
        if serves and named.get("master_listen_fd") is None:
            server = _listening(host, port)
            if server is not None:
                port = server.getsockname()[1]
                named["master_listen_fd"] = server.detach()
        super().__init__(host, port, world_size, *given, **named)


def install_single_address_store() -> None:
    """Let every store that this process makes from now on be a ``SingleAddressTCPStore``, also
    those that ``init_process_group`` and torch's launcher make.
    """
    # A function of torch.distributed has the name of the module.
    for module in (dist, import_module("torch.distributed.rendezvous")):
        module.TCPStore = SingleAddressTCPStore  # type: ignore[attr-defined]


def _listening(host: str, port: int) -> socket.socket | None:
    """A socket that listens at the host's address; None where torch has to choose."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, _, _, _, sockaddr in found:
        address = str(sockaddr[0])
        if address != host and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            continue
        try:
            return socket.create_server(sockaddr, family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                # Perhaps by another store of this process, which torch shares.
                return None
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    _log.warning(
        "the store of %s listens at all addresses of this machine: the name leads to %s here, "
        "where no other host would reach it",
        host,
        ", ".join(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found)),
    )
    return None
