"""Runs on two hosts, which share an Ethernet but no memory."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import golden_runs
import psutil
import pytest
from launched_run import Job, Run
from test_resume import assert_same_steps

from ctrl_megatron.rollout.engine import available_engines

SLOW = 700.0
"""Seconds for a new start on two hosts, while other work keeps the machine busy."""
SCRIPT = Path(__file__).with_name("several_hosts.sh")


def can_make_hosts() -> bool:
    """Whether this process may give others names, shared memories and networks of their own."""
    return subprocess.run([SCRIPT, "1", "true"], capture_output=True, check=False).returncode == 0


pytestmark = [
    # A busy machine may be several times slower than an idle one.
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_hosts(), reason="needs root, namespaces and ip"),
]

# Two ranks and two engines a host: each host holds one half of two copies, and the leaders are on
# the first. What a host lacks has to travel, and half of the prompts too. Dedicated engines never
# sleep.
STAGES = (
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    "actor_rollout_ref.rollout.placement=dedicated",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
)
# One rank and one engine a host: each holds a whole copy. No weights travel.
COPIES = ()
# Two ranks of a host share a copy of the weights, of which each host has one.
SHARDS = (
    "actor_rollout_ref.actor.strategy=fsdp",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
)
# All ranks of both hosts share one copy.
SPREAD = ("actor_rollout_ref.actor.strategy=fsdp",)


@pytest.mark.parametrize(
    ("extra", "ranks", "engines"),
    [
        (STAGES, 2, {"engine.log", "engine.1.log", "engine.2.log", "engine.3.log"}),
        pytest.param(COPIES, 1, {"engine.log", "engine.1.log"}, marks=pytest.mark.long),
        pytest.param(SHARDS, 2, {"engine.log", "engine.1.log"}, marks=pytest.mark.long),
        pytest.param(SPREAD, 2, {"engine.log", "engine.1.log"}, marks=pytest.mark.long),
    ],
    ids=["stages", "copies", "shards", "spread"],
)
def test_engines_follow_a_trainer_that_is_spread_over_hosts(
    job: Job, extra: tuple[str, ...], ranks: int, engines: set[str]
) -> None:
    settings = (
        *("trainer.nnodes=2", f"trainer.n_gpus_per_node={ranks}"),
        "actor_rollout_ref.rollout.update_bucket_megabytes=1",
    )
    name = f"hosts_of_{ranks}_{len(extra)}"
    given = (*extra, *settings)
    with job.launch(name, steps=2, extra=given, hosts=2, ranks=ranks, preloaded=True) as run:
        assert run.ends() == 0, run.output()[-8000:]
    records = [record["metrics"] for record in run.metrics()]
    assert len(records) == 2
    for metrics in records:
        assert metrics["actor/grad_norm"] > 0.0
        # In the second step the engines hold what the first has learned.
        assert metrics["rollout/probs_diff_mean"] < 1e-4
        # Every engine draws, and every host's sandbox says what it can do.
        assert metrics["perf/engine_balance"] > 0.0
        assert "sandbox/isolation" in metrics
    assert {path.name for path in run.folder.glob("engine*.log")} == engines


@pytest.mark.long
@pytest.mark.parametrize("hosts", [(2, 1), (1, 2)], ids=["two_then_one", "one_then_two"])
def test_fsdp_on_two_hosts_is_that_of_one_and_resumes_there(
    job: Job, hosts: tuple[int, int]
) -> None:
    four, saving = (*SPREAD, "trainer.n_gpus_per_node=4"), ("trainer.save_freq=1",)
    name = f"fsdp_on_{hosts[0]}_then_{hosts[1]}"  # the runs of a module share a folder
    with job.launch(f"{name}_whole", steps=2, extra=four, ranks=4, preloaded=True) as whole:
        assert whole.ends(SLOW) == 0, whole.output()[-8000:]
    for step, count in enumerate(hosts, start=1):
        each = 4 // count
        given = (f"trainer.nnodes={count}", f"trainer.n_gpus_per_node={each}", *saving)
        with job.launch(
            name,
            steps=step,
            extra=(*SPREAD, *given),
            hosts=count,
            ranks=each,
            preloaded=True,
        ) as run:
            assert run.ends(SLOW) == 0, run.output()[-8000:]
    assert starts(run) == [1] and [record["step"] for record in run.metrics()] == [1, 2]
    assert_same_steps(run, whole)


# One engine of two workers, one on each host.
SPANNING = (
    *("trainer.nnodes=2", "trainer.n_gpus_per_node=1"),
    *(
        "actor_rollout_ref.rollout.placement=dedicated",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
    ),
    *(
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.kv_cache_gib=0.2",
    ),
    "actor_rollout_ref.rollout.update_bucket_megabytes=1",
)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", ["shared_memory", "shards", "nccl"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_has_workers_on_two_hosts(job: Job, engine: str, transport: str) -> None:
    # Every push compares the checksums of what both workers hold with those of the trainer.
    given = (*spanning(engine), f"actor_rollout_ref.rollout.weight_transport={transport}")
    name = f"{engine}_spans_{transport}"
    with job.launch(name, steps=3, extra=given, hosts=2, ranks=1, preloaded=True) as run:
        assert run.ends(SLOW) == 0, run.output()[-8000:]
    records = [record["metrics"] for record in run.metrics()]
    assert len(records) == 3
    for metrics in records:
        assert metrics["rollout/probs_diff_mean"] < 1e-4
    assert {path.name for path in run.folder.glob("engine*.log")} == {
        "engine.log",
        "engine.part1.log",
    }


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("engine", "title"), [("vllm", "VLLM"), ("sglang", "sglang::scheduler")])
def test_both_parts_of_an_engine_start_again_when_a_worker_has_died(
    job: Job, engine: str, title: str
) -> None:
    extra, name = spanning(engine), f"{engine}_worker_lost"
    with job.launch(name, steps=4, extra=extra, hosts=2, ranks=1, preloaded=True) as run:
        run.wait_for(lambda: len(run.metrics()) >= 1, within=SLOW)
        # A worker's title is where its environment was.
        there = {network_of(p) for p in run.look() if host_of(p) == "1"}
        (worker,) = (
            p for p in run.look() if title in " ".join(p.cmdline()) and network_of(p) in there
        )
        worker.kill()
        assert run.ends(SLOW) == 0, run.output()[-8000:]
    records = [record["metrics"] for record in run.metrics()]
    assert len(records) == 4
    assert records[-1]["engine/restarts"] >= 1
    for metrics in records:
        assert metrics["rollout/probs_diff_mean"] < 1e-4
    assert run.output().count("is started again (restart 1,") == 2, "one on each host"


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_run_goes_on_without_a_host_and_with_it_when_it_is_back(job: Job) -> None:
    # One rank adds in another order than two, which must not draw other tokens.
    saving = ("trainer.save_freq=1", *golden_runs.DRAWN)
    with job.launch("with_all_hosts", steps=12, extra=golden_runs.DRAWN, preloaded=True) as whole:
        assert whole.ends() == 0, whole.output()[-8000:]
    hosts = ("trainer.nnodes=2", "trainer.min_nnodes=1", "trainer.n_gpus_per_node=1", *saving)
    with job.launch(
        "hosts_come_and_go", steps=12, extra=hosts, hosts=2, ranks=1, restarts=3, least=1
    ) as run:
        run.wait_for_steps(2)
        lost = [p for p in run.look() if p.name() != "sh" and host_of(p) == "1"]
        assert len(lost) >= 4  # the launcher, a rank, an engine and a sandbox
        for process in lost:
            process.kill()
        run.wait_for(lambda: len(starts(run)) == 1, within=SLOW)
        alone = starts(run)[0]
        run.wait_for(lambda: run.metrics()[-1]["step"] > alone)
        run.back.touch()
        run.wait_for(lambda: len(starts(run)) == 2, within=SLOW)
        assert run.ends(SLOW) == 0, run.output()[-8000:]
    named = r"rank 1 on host host1 (is lost|has not been heard of)"
    assert re.search(f"rank 0 stops because {named}", run.output()), run.output()[-8000:]
    assert sorted({record["step"] for record in run.metrics()}) == list(range(1, 13))
    assert starts(run)[1] > alone, "all ranks ran on one host for a step"
    assert_same_steps(run, whole, rel=1e-5)


def spanning(engine: str) -> tuple[str, ...]:
    """The settings of one engine with a worker on each of two hosts."""
    if engine not in available_engines():
        pytest.skip(f"{engine} is not installed; `make env` brings it")
    return (*SPANNING, f"actor_rollout_ref.rollout.name={engine}")


def starts(run: Run) -> list[int]:
    """The steps after which the run has been continued."""
    return [int(step) for step in re.findall(r"continuing from \S+ after step (\d+)", run.output())]


def network_of(process: psutil.Process) -> str:
    """The network namespace of a process, which its host has for itself."""
    return os.readlink(f"/proc/{process.pid}/ns/net")


def host_of(process: psutil.Process) -> str | None:
    """The number of the host on which a process of ``several_hosts.sh`` runs."""
    return process.environ().get("PET_NODE_RANK")
