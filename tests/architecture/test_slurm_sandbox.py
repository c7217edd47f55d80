"""slurm/sandbox.sh with a stand-in for srun and a real service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm/sandbox.sh"
# One machine of the job; a stop of the job reaches its process.
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$STUBS/srun.args"
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=3 exec "$@"
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text(SRUN)
    (tmp_path / "bin/srun").chmod(0o755)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(sys.executable)
    (tmp_path / "venv/pyvenv.cfg").write_text(Path(sys.prefix, "pyvenv.cfg").read_text())
    (tmp_path / "venv/lib").symlink_to(Path(sys.prefix, "lib"))
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "STUBS": str(tmp_path),
        "CTRL_VENV": str(tmp_path / "venv"),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_ON_NODE": "96",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "ENDPOINTS": str(tmp_path / "endpoints"),
        "TOKEN_FILE": str(tmp_path / "token"),
    }


def test_bash_accepts_the_script() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    assert os.access(SCRIPT, os.X_OK)


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "CTRL_VENV", "SLURM_JOB_NUM_NODES"])
def test_what_is_missing_is_named(job: dict[str, str], missing: str) -> None:
    del job[missing]
    done = subprocess.run(["bash", str(SCRIPT)], env=job, capture_output=True, text=True)
    assert done.returncode == 2 and missing in done.stderr


def test_a_service_announces_itself_asks_for_the_token_and_goes(job: dict[str, str]) -> None:
    command = ["bash", str(SCRIPT), "--isolation", "standard", "--workers", "1"]
    command += ["--host", "127.0.0.1"]
    service = subprocess.Popen(command, env=job, stdout=subprocess.PIPE, text=True)
    file = Path(job["ENDPOINTS"], "3")
    try:
        deadline = time.monotonic() + 90
        while not file.exists():
            assert service.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        endpoint = file.read_text().strip()
        token = Path(job["TOKEN_FILE"])
        assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text().strip()) == 64
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(endpoint + "/stats", timeout=30)
        header = {"Authorization": f"Bearer {token.read_text().strip()}"}
        with urllib.request.urlopen(
            urllib.request.Request(endpoint + "/stats", headers=header), timeout=30
        ) as answer:
            assert answer.status == 200
    finally:
        service.send_signal(signal.SIGTERM)
        service.communicate(timeout=60)
    assert service.returncode == 0 and not file.exists()
    assert (Path(job["STUBS"]) / "srun.args").read_text().splitlines()[:6] == [
        *("--nodes=2", "--ntasks=2", "--ntasks-per-node=1"),
        *("--cpus-per-task=96", "--cpu-bind=none", "--mem=0"),
    ]
