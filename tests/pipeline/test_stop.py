"""A request to stop, which launchers send to a rank's whole process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Helpers as Megatron's checkpoint writer keeps them: one from within a save, one from outside.
PROGRAM = """
import multiprocessing, os, signal
from ctrl_megatron.pipeline.stop import StopFlag, requests_held

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    flag = StopFlag().install()
    with requests_held():
        kept = context.Manager()
    lost = context.Manager()
    with requests_held():
        os.killpg(0, signal.SIGTERM)
        during = flag.is_set
    lost._process.join()
    kept.Queue().put("still there")
    print(during, flag.is_set, lost._process.exitcode)
    kept.shutdown()
"""


def test_helpers_from_a_save_outlive_a_request_and_the_save_is_finished_first(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True", str(-signal.SIGTERM)]
