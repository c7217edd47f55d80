"""Resource limits of one process."""

from __future__ import annotations

import math
import os
import resource


def limit(
    *, memory_bytes: int, cpu_seconds: float, file_bytes: int, open_files: int, processes: int
) -> None:
    """Set soft and hard limits; a hard limit that is lower already stays."""
    seconds = math.ceil(cpu_seconds) + 1
    wanted = {
        resource.RLIMIT_AS: (memory_bytes, memory_bytes),
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_FSIZE: (file_bytes, file_bytes),
        resource.RLIMIT_NOFILE: (open_files, open_files),
        resource.RLIMIT_NPROC: (processes, processes),
        resource.RLIMIT_CORE: (0, 0),
    }
    for kind, (soft, hard) in wanted.items():
        ceiling = resource.getrlimit(kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(kind, (soft, hard))


def tasks_of_user() -> int:
    """Threads that this user runs on the machine: RLIMIT_NPROC counts them all outside a user
    namespace.
    """
    uid, total = os.getuid(), 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # the process ended while we looked
    return total
