"""Ending a whole process tree, also where no pid namespace does it for us."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping


def end_all(started: Mapping[str, int], *, isolated: bool) -> dict[str, int]:
    """Kill the children ``started`` (role -> pid) and everything below them, and wait until nothing
    is left; role -> wait status.

    With a pid namespace the kernel ends all processes of a candidate with it. Otherwise the caller
    must be a subreaper without other children: orphans become its children, which are killed until
    there are none.
    """
    roles = {pid: role for role, pid in started.items()}
    statuses: dict[str, int] = {}
    for pid in roles:
        _kill(pid)
    if isolated:
        return {role: os.waitpid(pid, 0)[1] for pid, role in roles.items()}
    while True:
        for child in _children():
            _kill(child)
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return statuses
        if pid in roles:
            statuses[roles[pid]] = status


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _children() -> list[int]:
    own = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stream:
                parent = int(stream.read().rpartition(")")[2].split()[1])
        except OSError:
            continue  # ended while we looked
        if parent == own:
            found.append(int(name))
    return found
