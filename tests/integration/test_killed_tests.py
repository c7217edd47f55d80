"""A test run that is killed leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from guardian import marked
from patience import PATIENCE
from tiny_run import REPOSITORY

WITHIN = 10.0
"""Seconds from the kill to the end of the last process."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "processes"),
    [
        # The launcher and the ranks.
        pytest.param("test_the_ranks_start", 3, marks=pytest.mark.long),
        # And the forks' server, an engine, a sandbox.
        pytest.param("test_a_step", 6, marks=pytest.mark.long),
    ],
)
def test_nothing_outlives_a_killed_test_run(tmp_path: Path, name: str, processes: int) -> None:
    ready = tmp_path / "ready"
    environ = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST")}
    file = f"tests/integration/killed_tests.py::{name}"
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        cwd=REPOSITORY,
        env=environ | {"READY_FILE": str(ready)},
        process_group=0,
    ) as tests:
        try:
            deadline = time.monotonic() + PATIENCE
            while not ready.exists():
                assert tests.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            guardian = next(c for c in psutil.Process(tests.pid).children() if _guards(c))
            mark = guardian.cmdline()[-1]
            assert len(marked(mark)) >= processes
        finally:
            os.kill(tests.pid, signal.SIGKILL)
        killed = time.monotonic()
    while marked(mark) and time.monotonic() < killed + WITHIN:
        time.sleep(0.1)
    print(f"all gone {time.monotonic() - killed:.1f} s after the kill")
    assert marked(mark) == []


def _guards(process: psutil.Process) -> bool:
    return any(word.endswith("guardian.py") for word in process.cmdline())
