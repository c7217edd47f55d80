"""The resources of a running service: processes, descriptors, namespaces, mounts, files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ctrl_megatron.sandbox.service.worker import PROCESS_MARK

_SYSTEM_V = ("shm", "sem", "msg")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTable:
    """State outside the service's own process; two of an idle service are equal."""

    pids: frozenset[int]
    """Below the service, and any process of its workers wherever it hangs in the process tree."""
    zombies: int
    descriptors: int
    """Open in the workers."""
    namespaces: frozenset[str]
    mounts: tuple[str, ...]
    """Mount points of this process and of the workers, one line each."""
    files: frozenset[str]
    """Below the service's scratch directory, and what the workers' users own in ``/tmp``,
    ``/var/tmp`` and ``/dev/shm``."""
    system_v: tuple[str, ...]

    @property
    def processes(self) -> int:
        """Number of processes below the service."""
        return len(self.pids)


def read_process_table(service: int, scratch: str) -> ProcessTable:
    """State of the workers of the service with pid ``service``."""
    pids = _family(service)
    users = {_uid(pid) for pid in pids} - {os.getuid(), None}
    return ProcessTable(
        pids=pids,
        zombies=sum(_state(pid) == "Z" for pid in pids),
        descriptors=sum(map(_descriptors, pids)),
        namespaces=frozenset(name for pid in pids for name in _namespaces(pid)),
        mounts=tuple(line for pid in ("self", *sorted(pids)) for line in _mounts(pid)),
        files=frozenset(_below(Path(scratch))) | frozenset(_owned_by(users)),
        system_v=tuple(_read(f"/proc/sysvipc/{kind}") for kind in _SYSTEM_V),
    )


def _family(service: int) -> frozenset[int]:
    """Processes below ``service``, and those that carry its mark wherever they are."""
    parents: dict[int, int] = {}
    marked: set[int] = set()
    mark = f"{PROCESS_MARK}{service}\0".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        stat = _stat(int(name))
        if stat:
            parents[int(name)] = int(stat[1])
            if mark in _read(f"/proc/{name}/cmdline").encode(errors="surrogateescape"):
                marked.add(int(name))
    found, frontier = marked, {service}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - {service}
        found |= frontier
    return frozenset(found)


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc/pid/stat`` from the state on; empty when the process is gone."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _state(pid: int) -> str:
    return next(iter(_stat(pid)), "")


def _uid(pid: int) -> int | None:
    # The owner of the directory is root for a process that is not dumpable, so status is read.
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    return None


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0  # gone, or of another user


def _namespaces(pid: int) -> Iterable[str]:
    folder = f"/proc/{pid}/ns"
    try:
        return [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
    except OSError:
        return []


def _mounts(pid: int | str) -> list[str]:
    return [f"{pid}: {line}" for line in _read(f"/proc/{pid}/mountinfo").splitlines()]


def _below(folder: Path) -> Iterable[str]:
    return [str(path) for path in folder.rglob("*")]


def _owned_by(users: set[int | None]) -> Iterable[str]:
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        for entry in os.scandir(folder) if os.path.isdir(folder) else ():
            try:
                if entry.stat(follow_symlinks=False).st_uid in users:
                    yield entry.path
            except OSError:
                continue  # removed while we looked


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:
            return stream.read()
    except OSError:
        return ""
