"""Ends an engine's process group when its parent or its main process ends."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from contextlib import suppress

_POLL_SECONDS = 0.25
_GUARD_SECONDS = 2.0
"""Seconds that the guard has to end the group before the process does so itself."""
_TRACKER_SECONDS = 5.0
_TRACKER = "multiprocessing.resource_tracker"


def end_with_parent() -> None:
    """Fork a guard that kills this process group when the parent or this process is gone.

    Standard input must be a pipe whose other end the parent keeps open. Call this in the leader of
    a process group of its own, before any thread exists and before heavy imports (the guard keeps
    this process's memory image). It works whatever the processes do, also when SIGKILL ends this
    process while its children continue. A thread of this process does the same for a parent that
    ends after the guard.
    """
    leader, parent = os.getpid(), os.getppid()
    if os.getpgrp() != leader:
        raise RuntimeError("end_with_parent must be called in the leader of a process group")
    if os.fork() == 0:
        _guard(leader, parent)
    watch = threading.Thread(
        target=_without_guard, args=(leader, parent), name="parent-watch", daemon=True
    )
    watch.start()


def _without_guard(leader: int, parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    # Otherwise both could kill each other and leave the children.
    time.sleep(_GUARD_SECONDS)
    kill_process_group(leader)
    os._exit(1)


def _guard(leader: int, parent: int) -> None:
    # A signal to the whole group must leave the guard, which ends the rest of it.
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    # Whoever reads a pipe of the process has to see that it ended, though the guard lives.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    pipe_closed = False
    # The pipe alone is not enough: children that the parent forked may keep its other end open.
    while not pipe_closed and os.getppid() == leader and _stat(leader)[1:2] == [str(parent)]:
        if select.select([0], [], [], _POLL_SECONDS)[0]:
            pipe_closed = not os.read(0, 4096)
    kill_process_group(leader)
    os._exit(0)


def _proc_file(pid: int, name: str) -> str:
    """The content of /proc/PID/NAME; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _stat(pid: int) -> list[str]:
    """The process's state, parent, group, ...; empty if there is no such process."""
    return _proc_file(pid, "stat").rpartition(")")[2].split()


def process_gone(pid: int) -> bool:
    """True if no such process runs; a zombie counts as gone."""
    fields = _stat(pid)
    return not fields or fields[0] in "ZX"


def process_start_ticks(pid: int) -> int | None:
    """Clock ticks from the machine's boot to the start of the process; None if it does not run."""
    return None if process_gone(pid) else int(_stat(pid)[19])


def process_group_members(group: int) -> list[int]:
    """Process ids of the group's members, without zombies."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    stats = ((pid, _stat(pid)) for pid in pids)
    return [pid for pid, s in stats if s and int(s[2]) == group and s[0] not in "ZX"]


def kill_process_group(group: int) -> list[int]:
    """Kill a process group, the caller excepted; returns what is left of it, normally nothing.

    Python's resource trackers are spared at first: they end when the others are gone, and remove
    the shared memory that those have left.
    """
    deadline = time.monotonic() + _TRACKER_SECONDS
    while members := [pid for pid in process_group_members(group) if pid != os.getpid()]:
        late = time.monotonic() > deadline
        for pid in members:
            if late or _TRACKER not in _proc_file(pid, "cmdline"):
                # It may have ended between listing and killing.
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline + _TRACKER_SECONDS:
            return members
        time.sleep(0.02)
    return []
