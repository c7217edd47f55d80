"""slurm/ctrl_70b.sh with stand-ins for SLURM's commands and for torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm/ctrl_70b.sh"
SECONDS = 60

# Runs its command once, as the first machine would.
SRUN = """
printf '%s\\n' "$@" > "$STUBS/srun.args"
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 exec "$@"
"""
SCONTROL = """
echo "$*" >> "$STUBS/scontrol.calls"
[[ $1 != show ]] || printf 'gpu%02d\\n' $(seq 1 "$HOSTS")
"""
TORCHRUN = """
printf '%s\\n' "$@" > "$STUBS/torchrun.args"
env > "$STUBS/torchrun.env"
exit "$STATUS"
"""
WAITING_TORCHRUN = """
trap 'touch "$STUBS/asked"; exit 1' TERM
touch "$STUBS/up"
while true; do sleep 0.1; done
"""


def write_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\nset -eu\n{body}")
    path.chmod(0o755)


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of 8 machines; programs and their records lie in STUBS."""
    for name, body in (("bin/srun", SRUN), ("bin/scontrol", SCONTROL)):
        write_program(tmp_path / name, body)
    write_program(tmp_path / "venv/bin/torchrun", TORCHRUN)
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "STUBS": str(tmp_path),
        "HOSTS": "8",
        "STATUS": "0",
        "CTRL_VENV": str(tmp_path / "venv"),
        "SLURM_JOB_ID": "31234",
        "SLURM_JOB_NODELIST": "gpu[01-08]",
        "SLURM_JOB_NUM_NODES": "8",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }


def submit(job: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=dict(job),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def lines(job: Mapping[str, str], name: str) -> list[str]:
    return (Path(job["STUBS"]) / name).read_text().splitlines()


def test_bash_accepts_the_script() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    assert os.access(SCRIPT, os.X_OK)


def test_it_asks_for_8_machines_of_8_gpus_and_a_signal_before_the_end() -> None:
    asked = {w for w in SCRIPT.read_text().split() if w.startswith("--")}
    assert {"--nodes=8", "--gpus-per-node=8", "--ntasks-per-node=1", "--exclusive"} <= asked
    assert {"--requeue", "--signal=B:USR1@300"} <= asked


def test_it_starts_torchrun_on_every_machine(job: dict[str, str]) -> None:
    done = submit(job, "trainer.total_epochs=1", "trainer.logger=[console, jsonl]")
    assert done.returncode == 0, done.stderr
    step = lines(job, "srun.args")
    assert step[:4] == ["--nodes=8", "--ntasks=8", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    assert lines(job, "torchrun.args") == [
        *("--nnodes", "8", "--nproc-per-node", "8"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "gpu01:21234", "--rdzv-id", "31234-0"),
        *("--max-restarts", "0", "--shutdown-timeout", "270"),
        *("tools/train_rl.py", "--config", "examples/ctrl_70b.yaml"),
        *("trainer.total_epochs=1", "trainer.logger=[console, jsonl]"),
    ]
    environment = {
        name: value for name, _, value in (x.partition("=") for x in lines(job, "torchrun.env"))
    }
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert environment["PATH"].startswith(f"{job['CTRL_VENV']}/bin:")
    assert not [name for name in environment if name.startswith("CTRL_") or name == "CONFIG"]
    assert lines(job, "scontrol.calls") == ["show hostnames gpu[01-08]"]


def test_another_configuration_and_a_requeued_job(job: dict[str, str]) -> None:
    job |= {"CONFIG": "examples/ctrl_7b.yaml", "SLURM_RESTART_COUNT": "2"}
    assert submit(job).returncode == 0
    words = lines(job, "torchrun.args")
    assert words[words.index("--config") + 1] == "examples/ctrl_7b.yaml"
    assert words[words.index("--rdzv-id") + 1] == "31234-2"


NEEDED = (
    "CTRL_VENV SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_GPUS_ON_NODE "
    "SLURM_SUBMIT_DIR"
)


@pytest.mark.parametrize("name", NEEDED.split())
def test_a_missing_variable_is_named(job: dict[str, str], name: str) -> None:
    del job[name]
    done = submit(job)
    assert done.returncode == 2
    assert f"ctrl_70b: {name} is not set" in done.stderr
    assert not (Path(job["STUBS"]) / "srun.args").exists()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CTRL_VENV", "/nowhere", "/nowhere/bin/torchrun is missing"),
        ("CONFIG", "examples/none.yaml", "CONFIG=examples/none.yaml does not exist"),
        ("SLURM_SUBMIT_DIR", "/", "submit from the root of the checkout"),
        ("HOSTS", "7", "scontrol lists 7 hosts"),
    ],
)
def test_a_wrong_value_is_named(job: dict[str, str], name: str, value: str, words: str) -> None:
    done = submit({**job, name: value})
    assert done.returncode == 2
    assert words in done.stderr
    assert not (Path(job["STUBS"]) / "srun.args").exists()


def test_a_failure_is_passed_on_and_not_requeued(job: dict[str, str]) -> None:
    assert submit({**job, "STATUS": "13"}).returncode == 13
    assert not [call for call in lines(job, "scontrol.calls") if call.startswith("requeue")]


def test_near_the_time_limit_the_run_is_asked_to_stop_and_requeued(job: dict[str, str]) -> None:
    stubs = Path(job["STUBS"])
    write_program(stubs / "venv/bin/torchrun", WAITING_TORCHRUN)
    with subprocess.Popen(
        ["bash", str(SCRIPT)],
        env=job,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            deadline = time.monotonic() + SECONDS
            while not (stubs / "up").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGUSR1)
            errors = process.communicate(timeout=SECONDS)[1]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert (stubs / "asked").exists(), errors
    assert process.returncode == 1
    assert lines(job, "scontrol.calls")[-1] == "requeue 31234"
