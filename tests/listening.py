"""Where the processes of a test listen."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

import psutil


def listening(processes: Iterable[psutil.Process]) -> dict[str, str]:
    """``ADDRESS:PORT`` of every TCP socket that one of the processes listens at now -> its name."""
    found: dict[str, str] = {}
    for process in processes:
        try:
            sockets = process.net_connections("tcp")
            name = f"{process.name()} ({process.pid})"
        except psutil.NoSuchProcess:
            continue
        for one in sockets:
            if one.status == psutil.CONN_LISTEN:
                found[f"{one.laddr.ip}:{one.laddr.port}"] = name
    return found


def reached_from_outside(sockets: dict[str, str]) -> dict[str, str]:
    """Those that do not listen on loopback."""
    return {
        place: name
        for place, name in sockets.items()
        if not ipaddress.ip_address(place.rpartition(":")[0]).is_loopback
    }
