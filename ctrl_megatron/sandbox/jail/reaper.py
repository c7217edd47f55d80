"""Ending a whole process tree, also where no pid namespace does it for us."""

from __future__ import annotations

import os
import signal


def end_tree(init: int, *, isolated: bool) -> None:
    """Kill ``init`` and everything below it, and wait until nothing is left.

    In a pid namespace the kernel ends all processes with pid 1. Otherwise the caller must be a
    subreaper: orphans become its children, which are killed until there are none.
    """
    if isolated:
        _kill(init)
        os.waitpid(init, 0)
        return
    while True:
        for child in _children():
            _kill(child)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


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
