"""The training scripts in a real SLURM: ``make test-slurm``.

One job, as a cluster treats it over days: its time limit comes near, a machine is lost, a rank
crashes, and a user cancels it. Each time but the last it must go on where it was.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator

import psutil
import pytest
from launched_run import Job
from slurm_cluster import Cluster, cluster, missing
from tiny_run import REPOSITORY

from ctrl_megatron.metrics import read_json_lines

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(missing() is not None, reason=f"no SLURM here: {missing()}"),
]

ON_TWO = (
    *("--parsable", "--nodes=2", "--gpus-per-node=1", "--time=60", "--signal=B:USR1@300"),
    str(REPOSITORY / "slurm/ctrl_70b.sh"),
)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """Three nodes; one more than a job needs."""
    with cluster(["n0", "n1", "n2"], cpus=2, gpus=1) as made:
        yield made


class Submitted:
    """A job of ``slurm/ctrl_70b.sh`` and what it writes."""

    def __init__(self, slurm: Cluster, job: Job, name: str, *extra: str) -> None:
        self.slurm, self.folder = slurm, job.folder / name
        self.output = job.folder / f"{name}.out"
        job.folder.mkdir(parents=True, exist_ok=True)
        here = os.getcwd()
        os.chdir(REPOSITORY)  # a job's SLURM_SUBMIT_DIR
        try:
            self.number = slurm.run(
                "sbatch",
                f"--output={self.output}",
                *ON_TWO,
                *job.overrides(name, 10_000),
                *("trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.save_freq=1"),
                *extra,
                extra={"CTRL_VENV": sys.prefix, "CONFIG": "examples/ctrl_smollm2_cpu.yaml"},
            )
        finally:
            os.chdir(here)
        self.crashes = REPOSITORY / f"ctrl_70b-{self.number}.crashes"

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def steps(self) -> list[int]:
        path = self.folder / "metrics.jsonl"
        return [record["step"] for record in read_json_lines(path)] if path.is_file() else []

    def wait_for_text(self, pattern: str, count: int = 1) -> None:
        self.slurm.wait_for(
            lambda: len(re.findall(pattern, self.text())) >= count, repr(pattern), self.output
        )

    def wait_for_more_steps(self, count: int = 2) -> None:
        wanted = len(self.steps()) + count
        self.slurm.wait_for(lambda: len(self.steps()) >= wanted, f"{count} steps", self.output)

    def wait_for_state(self, *states: str) -> None:
        self.slurm.wait_for(
            lambda: self.slurm.job(self.number)["JobState"] in states, f"{states}", self.output
        )

    def wait_for_no_processes(self) -> None:
        self.slurm.wait_for(lambda: not self.ours(), "end of its processes", self.output)

    def ours(self) -> list[psutil.Process]:
        return self.slurm.processes(self.number)


def test_wrong_input_ends_the_job(slurm: Cluster, job: Job) -> None:
    wrong = Submitted(slurm, job, "misspelt", "data.train_bach_size=4")
    wrong.wait_for_state("FAILED")
    assert "did you mean 'data.train_batch_size'?" in wrong.text()
    assert slurm.job(wrong.number)["ExitCode"] == "2:0"
    assert slurm.job(wrong.number)["Restarts"] == "0" and not wrong.crashes.exists()


def test_a_job_outlives_its_time_limit_a_machine_and_a_crash(slurm: Cluster, job: Job) -> None:
    run = Submitted(slurm, job, "long")
    try:
        run.wait_for_more_steps()
        # All machines were looked at first, and this site's binding to one processor is undone.
        assert set(re.findall(r"^([01]): pass  machine +(n\d)", run.text(), re.M)) == {
            ("0", "n0"),
            ("1", "n1"),
        }
        usable = set(os.sched_getaffinity(0))
        assert f"{len(usable)} of {os.cpu_count()} usable" in run.text()
        assert re.search(r"clocks +0\.\d+ s apart", run.text())
        for process in run.ours():
            if "tools/train_rl.py" in process.cmdline():
                assert set(process.cpu_affinity()) == usable

        the_time_limit_comes_near(run)
        a_machine_is_lost(run)
        a_rank_crashes(run)

        slurm.run("scancel", run.number)
        run.wait_for_state("CANCELLED")
        run.wait_for_no_processes()
        assert slurm.job(run.number)["Restarts"] == "2"
        # Nothing was lost but steps that no checkpoint held yet, and none was left out.
        assert sorted(set(run.steps())) == list(range(1, max(run.steps()) + 1))
    finally:
        slurm.run("scancel", "--quiet", run.number)
        run.crashes.unlink(missing_ok=True)


def the_time_limit_comes_near(run: Submitted) -> None:
    """SLURM itself sends USR1; the run saves between two steps and goes on after the last."""
    run.slurm.run("scontrol", "update", f"JobId={run.number}", "TimeLimit=6")
    run.wait_for_text("requeueing job")
    assert "ctrl_70b: asked to stop (USR1)" in run.text()
    saved = re.search(r"stopped as asked; the state after step (\d+) is saved", run.text())
    assert saved, run.text()[-6000:]
    run.wait_for_state("PENDING", "RUNNING")
    run.slurm.run("scontrol", "update", f"JobId={run.number}", "TimeLimit=60")
    run.wait_for_text(rf"continuing from \S+ after step {saved[1]}\b")
    assert not run.crashes.exists()
    run.wait_for_more_steps()


def a_machine_is_lost(run: Submitted) -> None:
    """SLURM requeues the job onto the machines that are left."""
    lost = run.slurm.nodes["n1"]
    os.kill(lost.pid, signal.SIGKILL)
    lost.wait(20)
    run.wait_for_text("continuing from", 2)
    assert run.slurm.job(run.number)["NodeList"] == "n[0,2]"
    run.wait_for_more_steps()


def a_rank_crashes(run: Submitted) -> None:
    """The script starts the ranks again on the job's machines."""
    rank = next(p for p in run.ours() if "tools/train_rl.py" in p.cmdline() and is_rank(p, "1"))
    rank.kill()
    run.wait_for_text(r"crashed \(exit code 137\); restart 1 of at most 2 in a row, on 2 machines")
    run.wait_for_text("continuing from", 3)
    assert not run.crashes.exists()
    run.wait_for_more_steps()


def is_rank(process: psutil.Process, number: str) -> bool:
    """Whether the process is that rank of the run, not its launcher."""
    return process.environ().get("RANK") == number and process.environ().get("LOCAL_RANK") == "0"
