"""Ends what a test run has started when the run itself was killed.

Every process below the run inherits a variable of its environment, whoever its parent is by now.
The guardian waits on a pipe that only the run keeps open, and then kills what has the variable.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import MutableMapping
from contextlib import suppress

VARIABLE = "STARTED_BY_TEST_RUN"
_SECONDS = 10.0
"""Time in which processes may start others that are not found at once."""


def guard(environ: MutableMapping[str, str] = os.environ) -> subprocess.Popen[bytes]:
    """Mark the environment of this process, and start the guardian of all that inherit it."""
    environ[VARIABLE] = mark = uuid.uuid4().hex
    return subprocess.Popen(
        [sys.executable, "-IS", __file__, mark],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env={},
    )


def marked(mark: str) -> list[int]:
    """Process ids of those that inherited ``mark``, zombies left out."""
    wanted, found = f"{VARIABLE}={mark}".encode(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if wanted in file.read().split(b"\0"):
                found.append(int(name))
    return found


def _main(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    quiet, deadline = 0, time.monotonic() + _SECONDS
    while quiet < 3 and time.monotonic() < deadline:
        left = marked(mark)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if left else quiet + 1
        time.sleep(0.1)


if __name__ == "__main__":
    _main(sys.argv[1])
