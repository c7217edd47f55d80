"""What a job, an answer and a request may use, and how a job is isolated: every bound of the
sandbox. Standard library only: the jail reads it too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Level = Literal["strict", "standard", "none"]
"""``strict`` refuses to start with less than namespaces and a system call filter, ``standard``
with less than namespaces or, in their place, Landlock and the filter; ``none`` tries nothing."""
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
    problem_seconds: float = 160.0
    """What the jobs of one problem may spend on workers, all its tests together, compilation and
    checker included, where the request names nothing else; never less than one test's time."""
    max_problem_seconds: float = 3600.0
    """Upper bound of what a request may ask for."""
    max_timeouts: int = 2
    """Tests of one problem that may time out before the rest counts as failed unseen."""
    memory_mb: int = 1024
    """Address space of each process, MiB, where the request names none."""
    max_memory_mb: int = 8192
    """Upper bound of the memory a request may ask for."""
    output_bytes: int = 1 << 20
    """Kept of stdout and of stderr, each, of stdout as much as the expected output takes where that
    is more; a program that writes four times as much is killed."""
    file_bytes: int = 16 << 20
    """Largest file a program may write."""
    disk_mb: int = 64
    """Size of the private temporary directory, MiB; without namespaces of the files in it that have
    a name."""
    processes: int = 64
    """Processes and threads."""
    open_files: int = 64
    """File descriptors of one process."""
    request_bytes: int = 64 << 20
    """Largest HTTP request."""
    head_seconds: float = 10.0
    """In which the head of a request must arrive once its first byte, or its connection, has."""
    body_seconds: float = 60.0
    """In which a request's body must arrive. Answered 408 then."""
    connections: int = 4096
    """That are open at the same time, fewer where the process may have fewer descriptors. One more
    closes the one that has waited longest for its client, or waits."""
    service_mb: int = 4096
    """MiB of requests that are in work, answers included; a request beyond is answered 503."""
    queue: int = 100_000
    """Jobs that may wait; a request beyond is answered 503."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"sandbox limit {field.name} must be positive")


CALL_BYTES = 256 << 20
"""Of one call of a program's function, encoded."""
ANSWER_BYTES = 32 << 20
"""Of what such a call returns, encoded."""
DECODING_SECONDS = 2.0
"""What the judge spends on reading one returned value of more than ``DECODING_BYTES``."""
DECODING_BYTES = 1 << 16
INPUT_FILES = 2048
"""Files that a request may bring, or name to be fetched."""
NAME_BYTES, PATH_BYTES = 255, 4095
"""Of a part of a file's path, and of the path: what Linux takes."""
FETCHED_BYTES = 32 << 20
"""Of all files that are fetched from one run; a program that leaves more has failed."""
VERDICT_CHARACTERS = 128 << 10
"""Of program text and output told in all verdicts of one answer to ``/submit`` together."""
CASE_CHARACTERS = 1000
"""Of each text told of one case."""
COMPILER_MEMORY_MB = 2048
SHELL_MEMORY_MB = 256
"""MiB of address space; of each process of a shell."""
COMPILATIONS_BYTES = 256 << 20
"""Of compilations that are kept, binaries and messages."""
COMPILER_MESSAGE_CHARACTERS = 64 << 10
EXTRACTED_CHARACTERS = 1 << 16
"""Of a completion without a fence that are searched for a Python program."""
ATTEMPTS = 3
"""Workers that a job may bring down before its program is judged to do so."""
CHECKED_BYTES = 1 << 16
"""A longer request is read aside of the event loop."""
JSON_VALUES = 50_000
"""In such a request: nothing else of the service runs while its parser does."""
MOST_WAIT_SECONDS = 60.0
"""After which a client that named its request hears that the work goes on, at the latest."""
ABANDONED_SECONDS = 20.0
"""In which such a client has to come back, else its work is given up."""
ANSWERED_SECONDS = 120.0
KEPT_ANSWERS_BYTES = 64 << 20
"""How long such an answer is kept, and how much of them: for a client whose connection broke."""
IDLE_SECONDS = 75.0
"""In which a connection has to bring its next request."""
