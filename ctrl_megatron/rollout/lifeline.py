"""Sees to it that an engine's process group ends with its parent or with its main process."""

from __future__ import annotations

import os
import select
import signal
import time

_POLL_SECONDS = 0.25
_TRACKER_SECONDS = 5.0
_TRACKER = b"multiprocessing.resource_tracker"


def tie_group(parent_pipe: int) -> None:
    """Fork a guard that kills this process group when the parent or this process is gone.

    ``parent_pipe`` is the reading end of a pipe whose other end the parent holds. Call this in the
    leader of a process group of its own, before any thread exists and before heavy imports (the
    guard keeps this process's memory image). It works whatever the processes are busy with, also
    when this process is killed by SIGKILL while its own children go on.
    """
    leader, parent = os.getpid(), os.getppid()
    if os.getpgrp() != leader:
        raise RuntimeError("tie_group must be called in the leader of a process group")
    if os.fork() == 0:
        _guard(leader, parent, parent_pipe)


def _guard(leader: int, parent: int, parent_pipe: int) -> None:
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor != parent_pipe and descriptor > 2:
            _close_quietly(descriptor)
    pipe_closed = False
    # The pipe alone is not enough: children that the parent forked may hold its other end.
    while not pipe_closed and os.getppid() == leader and _parent_of(leader) == parent:
        if select.select([parent_pipe], [], [], _POLL_SECONDS)[0]:
            pipe_closed = not os.read(parent_pipe, 4096)
    end_group(leader)
    os._exit(0)


def _close_quietly(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        # The descriptor of the listing itself is closed already.
        return


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _parent_of(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def process_gone(pid: int) -> bool:
    """True if no such process runs; one that only waits to be reaped counts as gone."""
    fields = _stat(pid)
    return not fields or fields[0] in "ZX"


def group_members(group: int) -> list[int]:
    """Process ids of the group's members, without those that only wait to be reaped."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    found = ((pid, _stat(pid)) for pid in pids)
    return [pid for pid, f in found if f and int(f[2]) == group and f[0] not in "ZX"]


def end_group(group: int) -> list[int]:
    """Kill a process group, the caller excepted; returns what is left of it, normally nothing.

    Python's resource trackers are spared at first: they end by themselves when the others are
    gone, and remove the shared memory that those have left.
    """
    deadline = time.monotonic() + _TRACKER_SECONDS
    while members := [pid for pid in group_members(group) if pid != os.getpid()]:
        late = time.monotonic() > deadline
        for pid in members:
            if late or not _is_tracker(pid):
                _kill(pid)
        if time.monotonic() > deadline + _TRACKER_SECONDS:
            return members
        time.sleep(0.02)
    return []


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return _TRACKER in file.read()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        # Gone between listing and killing, which is what we want.
        return
