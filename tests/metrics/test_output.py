"""What happens to a program whose output nobody can take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, time
from pathlib import Path
from ctrl_megatron.metrics.output import ignore_closed_output

ignore_closed_output()
print("first", flush=True)
time.sleep(0.5)
for number in range(50):
    print("line", number, "x" * 4000)
    print("error", number, file=sys.stderr)
Path(sys.argv[1]).touch()
"""


def test_a_reader_that_leaves_stops_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "done")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == b"first\n"
        program.stdout.close()
        assert program.wait(60) == 0
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_full_disk_is_named(tmp_path: Path, stream: str) -> None:
    done = tmp_path / "done"
    with open("/dev/full", "wb") as full:
        other = {"stdout": "stderr", "stderr": "stdout"}[stream]
        program = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(done)],
            cwd=ROOT,
            **{stream: full, other: subprocess.PIPE},
        )
    assert program.returncode == 1 and not done.exists()
    if stream == "stdout":
        assert b"No space left on device: '/dev/full'" in program.stderr
