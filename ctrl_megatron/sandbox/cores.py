"""The number of processors that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CONTROL_GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Number of processors in this process's affinity, or fewer if a control group has a smaller
    quota.
    """
    allowed = len(os.sched_getaffinity(0))
    own = [line[3:] for line in Path("/proc/self/cgroup").read_text().split() if line[:3] == "0::"]
    folder = _CONTROL_GROUPS / own[0].lstrip("/") if own else _CONTROL_GROUPS
    limits = []
    for group in (folder, *folder.parents):
        if group.is_relative_to(_CONTROL_GROUPS) and (group / "cpu.max").is_file():
            limits.append((group / "cpu.max").read_text())
    return within_quotas(allowed, limits)


def within_quotas(allowed: int, limits: list[str]) -> int:
    """The whole processors of ``allowed`` that every limit permits, at least one.

    A limit is the text of a ``cpu.max``: microseconds of processor time, or ``max``, per period,
    and the length of the period in microseconds.
    """
    for quota, period in map(str.split, limits):
        if quota != "max":
            allowed = min(allowed, int(quota) // int(period))
    return max(1, allowed)
