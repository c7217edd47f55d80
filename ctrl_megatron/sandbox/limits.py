"""What a job may use and how it is isolated. Standard library only: the jail reads it too."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Level = Literal["strict", "standard", "none"]
"""``strict`` refuses to start with less than namespaces and a system call filter, ``standard``
takes what the kernel gives, ``none`` tries nothing."""
LEVELS: tuple[Level, ...] = ("strict", "standard", "none")
MECHANISMS: tuple[str, ...] = ("namespaces", "seccomp", "landlock")
Profile = Literal["binary", "compiler", "shell"]
"""Of a program that is not Python. ``binary`` may execute one program and start threads, like a
Python program, and sees no tools. ``compiler`` and ``shell`` may also start processes, which only a
pid namespace bounds: where there is none but Landlock holds, the service refuses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one job; a request may lower or raise its time and memory, nothing else."""

    test_seconds: float = 10.0
    """Wall clock of one test or run where the request names none."""
    max_test_seconds: float = 300.0
    """Upper bound of the wall clock a request may ask for."""
    job_seconds: float = 160.0
    """Wall clock of all asserts of one problem together (never less than one test's)."""
    max_timeouts: int = 2
    """Asserts of one problem that may time out before the rest counts as failed unseen."""
    memory_mb: int = 1024
    """Address space of each process, MiB, where the request names none."""
    max_memory_mb: int = 8192
    """Upper bound of the memory a request may ask for."""
    output_bytes: int = 1 << 20
    """Kept of stdout and of stderr, each; a program that writes four times as much is killed."""
    file_bytes: int = 16 << 20
    """Largest file a program may write."""
    disk_mb: int = 64
    """Size of the private temporary directory, MiB (enforced where namespaces are available)."""
    processes: int = 64
    """Processes and threads."""
    open_files: int = 64
    """File descriptors of one process."""
    request_bytes: int = 64 << 20
    """Largest HTTP request."""
    queue: int = 100_000
    """Jobs that may wait; a request beyond is answered 503."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"sandbox limit {field.name} must be positive")
