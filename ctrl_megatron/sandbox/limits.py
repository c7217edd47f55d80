"""All limits of the sandbox: of a job, an answer and a request; and the levels of isolation.
Standard library only, because the jail reads it too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

Level = Literal["strict", "standard", "none"]
"""Isolation levels. ``strict`` requires namespaces and a system call filter; ``standard`` requires
namespaces, or Landlock and the filter; ``none`` requires nothing."""
LEVELS: tuple[Level, ...] = ("strict", "standard", "none")
MECHANISMS: tuple[str, ...] = ("namespaces", "seccomp", "landlock")
Profile = Literal["binary", "compiler", "shell"]
"""Confinement of a program that is not Python. ``binary`` may execute one program and start
threads, like a Python program, and has no access to tools. ``compiler`` and ``shell`` may also
start processes, which requires a pid namespace: with Landlock alone the service refuses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one job. A request may change its time and memory only."""

    test_seconds: float = 10.0
    """Seconds of processor time of one test or run, unless the request names them."""
    max_test_seconds: float = 300.0
    """Maximum of ``test_seconds`` in a request."""
    wall_factor: float = 3.0
    """Seconds by the clock for each second of processor time that a test, a run or a problem may
    take. A program that waits ends then; on a busy machine a program that computes does not."""
    problem_seconds: float = 160.0
    """Seconds of processor time for all tests of one problem together, compilation and checker
    included, unless the request names them; never less than one test's time."""
    max_problem_seconds: float = 3600.0
    """Maximum of ``problem_seconds`` in a request."""
    max_timeouts: int = 2
    """Tests of one problem that may time out before the rest fails without a run."""
    memory_mb: int = 1024
    """Address space of each process in MiB, unless the request names it."""
    max_memory_mb: int = 8192
    """Maximum of ``memory_mb`` in a request."""
    output_bytes: int = 1 << 20
    """Bytes kept of stdout and of stderr each; of stdout as many as the expected output has, if
    that is more. A program that writes four times as much is killed."""
    file_bytes: int = 16 << 20
    """Bytes of the largest file that a program may write."""
    disk_mb: int = 64
    """Size of the private temporary directory in MiB. Without namespaces only files that have a
    name count."""
    processes: int = 64
    """Number of processes and threads."""
    open_files: int = 64
    """Number of file descriptors of one process."""
    request_bytes: int = 64 << 20
    """Bytes of the largest HTTP request."""
    head_seconds: float = 10.0
    """Seconds in which the head of a request must arrive, from its first byte or from the start of
    its connection."""
    body_seconds: float = 60.0
    """Seconds in which a request's body must arrive; after that the answer is 408."""
    connections: int = 4096
    """Connections that may be open at the same time, fewer if the process may have fewer
    descriptors. A further one closes the connection that has waited longest for its client, or
    waits."""
    service_mb: int = 4096
    """MiB of requests in progress, answers included; a request beyond is answered 503."""
    queue: int = 100_000
    """Number of jobs that may wait; a request beyond is answered 503."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"sandbox limit {field.name} must be positive")

    def validated_test_seconds(self, wanted: float | None) -> float:
        """Seconds of processor time of one test. Raises ``ValueError`` beyond the limit."""
        if wanted is None:
            return self.test_seconds
        if not math.isfinite(wanted) or not 0 < wanted <= self.max_test_seconds:
            raise ValueError(
                f"run_timeout must be in (0, {self.max_test_seconds:g}] seconds, got {wanted:g}"
            )
        return float(wanted)

    def validated_problem_seconds(self, wanted: Any, test_seconds: float) -> float:
        """Seconds for a whole problem; by default at least ``test_seconds``, the time of one test.
        Raises ``ValueError`` beyond the limit.
        """
        if wanted is None:
            return max(self.problem_seconds, test_seconds)
        number = isinstance(wanted, (int, float)) and not isinstance(wanted, bool)
        if not number or not 0 < wanted <= self.max_problem_seconds:
            most = f"{self.max_problem_seconds:g}"
            raise ValueError(f"extra.problem_seconds must be in (0, {most}], got {wanted!r}"[:200])
        return float(wanted)


CPU_TIME_OVER = "time limit exceeded (CPU time)"
WALL_TIME_OVER = "time limit exceeded (wall-clock time)"
"""Reasons in the verdict on a test that ran out of time."""
CANNOT_JUDGE = "cannot be judged"
NOT_RUN = "no test of the text can be run"
UNCHECKED = "no check of the test was executed"
"""Reasons that say nothing about the program: the judge could not decide, a text has no test that
can be run (after ``CANNOT_JUDGE``), and a test ended without a check."""
CALL_BYTES = 256 << 20
"""Size of one call of a program's function, encoded."""
ANSWER_BYTES = 32 << 20
"""Size of the result of such a call, encoded."""
DECODING_SECONDS = 2.0
"""Time in which the judge must decode one returned value of more than ``DECODING_BYTES``."""
DECODING_BYTES = 1 << 16
INPUT_FILES = 2048
"""Files that a request may contain, or name to be fetched."""
NAME_BYTES, PATH_BYTES = 255, 4095
"""Length of a part of a file's path, and of the whole path: the limits of Linux."""
FETCHED_BYTES = 32 << 20
"""Size of all files fetched from one run together; a program that leaves more has failed."""
VERDICT_CHARACTERS = 128 << 10
"""Characters of program text and output in all verdicts of one answer to ``/submit`` together."""
CASE_CHARACTERS = 1000
"""Characters of each text that is reported of one case."""
COMPILER_MEMORY_MB = 2048
SHELL_MEMORY_MB = 256
"""MiB of address space of a compiler, and of each process of a shell."""
COMPILATIONS_BYTES = 256 << 20
"""Size of all kept compilations together, binaries and messages."""
COMPILER_MESSAGE_CHARACTERS = 64 << 10
EXTRACTED_CHARACTERS = 1 << 16
"""Characters of a completion without a code fence that are searched for a Python program."""
ATTEMPTS = 3
"""Workers that a job may bring down before its program is declared the cause."""
CHECKED_BYTES = 1 << 16
"""Size from which a request is read in another thread, beside the event loop."""
JSON_VALUES = 50_000
"""Values in such a request. While the parser runs, the service does nothing else."""
MOST_WAIT_SECONDS = 60.0
"""Maximum time after which a client that named its request is answered that the work continues."""
ABANDONED_SECONDS = 20.0
"""Time in which such a client must ask again, or its work is given up."""
ANSWERED_SECONDS = 120.0
KEPT_ANSWERS_BYTES = 64 << 20
"""How long such an answer is kept for a client whose connection broke, and the size of all kept
answers."""
IDLE_SECONDS = 75.0
"""Time in which a connection must send its next request."""
