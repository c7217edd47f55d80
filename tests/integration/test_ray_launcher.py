"""``--launcher ray``: an actor on each machine starts the ranks that torchrun would start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden_runs
import psutil
import pytest
from launched_run import Job
from patience import PATIENCE
from tiny_run import REPOSITORY

from ctrl_megatron.metrics import read_json_lines

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.long,
    pytest.mark.skipif(
        not any(Path(folder, "ray").is_dir() for folder in sys.path),
        reason="the extra ray is not installed",
    ),
]
LOSSES = ("actor/loss", "actor/grad_norm", "critic/loss", "reward/mean")


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """The address of a Ray cluster of two nodes on this machine."""
    # Others may use the memory of this machine, for which Ray would kill actors.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
    os.environ |= {"RAY_worker_niceness": "0"}
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}
    found = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        found.add_node(**node)
        assert found.address is not None
        yield found.address
    finally:
        found.shutdown()


def command(job: Job, name: str, steps: int, *extra: str) -> list[str]:
    """The command of a run by two actors with a rank each."""
    program = [sys.executable, "tools/train_rl.py", "--config", "examples/ctrl_smollm2_cpu.yaml"]
    flags = ["--launcher", "ray", "--nproc-per-node", "1"]
    ranks = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.failure_timeout=10"]
    settings = [*job.overrides(name, steps), *golden_runs.DRAWN, *extra]
    return [*program, *flags, *settings, *ranks, "trainer.peak_tflops_per_device=0.1"]


def start(words: list[str], address: str, log: Path) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            words, cwd=REPOSITORY, env=environ, stdout=output, stderr=subprocess.STDOUT
        )


@pytest.mark.parametrize("name", ["ctrl_grpo", "ppo", "dapo"])
def test_two_actors_learn_what_two_ranks_of_torchrun_learn(
    job: Job, ray_address: str, name: str
) -> None:
    """Against the recorded runs of two ranks."""
    recorded = golden_runs.load(name)
    same = recorded["machine"] == golden_runs.machine()
    close: dict[str, Any] = {"rel": 1e-5, "abs": 2e-7} if same else golden_runs.DIFFERENT_MACHINE
    job.folder.mkdir(parents=True, exist_ok=True)
    log = job.folder / f"ray_{name}.log"
    process = start(command(job, f"ray_{name}", 2, *golden_runs.RL[name]), ray_address, log)
    assert process.wait(PATIENCE) == 0, log.read_text()[-8000:]
    folder = job.folder / f"ray_{name}"
    theirs = read_json_lines(folder / "metrics.jsonl")
    assert len(theirs) == 2
    for found, wanted in zip(theirs, recorded["steps"][:2], strict=True):
        known = {k: v for k, v in wanted["metrics"].items() if k in LOSSES}
        got: dict[str, Any] = {k: found["metrics"].get(k) for k in known}
        assert got == pytest.approx(known, **close)
    assert (folder / "report.html").is_file() and f"report: {folder}" in log.read_text()


def test_a_killed_actor_ends_the_run_with_its_name(job: Job, ray_address: str) -> None:
    log = job.folder / "ray_killed.log"
    job.folder.mkdir(parents=True, exist_ok=True)
    process = start(command(job, "ray_killed", 50), ray_address, log)
    ranks: list[psutil.Process] = []
    try:
        metrics = job.folder / "ray_killed/metrics.jsonl"
        deadline = time.monotonic() + PATIENCE
        while not (metrics.is_file() and metrics.read_text().count("\n")):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-8000:]
            time.sleep(0.2)
        ranks = [p for p in psutil.process_iter() if "ray_killed" in _experiment(p)]
        ranks = [p for p in ranks if p.pid != process.pid]
        second = next(p for p in ranks if p.environ().get("RANK") == "1")
        actor = second.parent()
        assert actor is not None
        actor.send_signal(signal.SIGKILL)
        assert process.wait(30) == 13, log.read_text()[-8000:]
        assert "the Ray actor of host 1" in log.read_text()
        assert not psutil.wait_procs(ranks, timeout=20)[1]
    finally:
        for left in [process, *ranks]:
            if left.poll() is None if isinstance(left, subprocess.Popen) else left.is_running():
                left.kill()


def _experiment(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    return next((w for w in words if w.startswith("trainer.experiment_name=")), "")
