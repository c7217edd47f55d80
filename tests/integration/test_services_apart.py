"""Engines and sandboxes on hosts without a model: the run computes what it does with all on one
host, and gets over the loss of any."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import golden_runs
import psutil
import pytest
from forked_run import run_forked
from launched_run import Job, Run
from test_several_hosts import SLOW, can_make_hosts, host_of, network_of, starts

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not can_make_hosts(), reason="needs root, namespaces and ip"),
]

_R, _P = "actor_rollout_ref.rollout.", "actor_rollout_ref.proxy."
OWN_PROXY = (*golden_runs.DRAWN, f"{_P}kind=engine", f"{_P}engine.name=hf")
APART = (
    *(*OWN_PROXY, f"{_R}placement=dedicated", f"{_R}weight_transport=nccl"),
    *("trainer.nnodes=4", "trainer.n_gpus_per_node=1", f"{_R}update_bucket_megabytes=1"),
    *("placement.rollout={hosts: [2]}", "placement.sandbox={hosts: [3]}"),
)
"""Hosts 0 and 1 train, 2 has the engines of actor and proxy, 3 the sandbox."""
EQUAL = {"rel": 1e-5, "abs": 2e-7}
LOSSES = ("actor/loss", "actor/pg_loss", "actor/grad_norm", "reward/mean", "actor/entropy")
STEPS = 6


@pytest.fixture(scope="module")
def services_job(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return replace(job, folder=tmp_path_factory.mktemp("services") / "runs")


@pytest.fixture(scope="module")
def one_host(services_job: Job) -> Callable[[int], list[dict[str, float]]]:
    """The metrics of so many steps of the same run where all of it is on one host."""

    @cache
    def metrics(steps: int) -> list[dict[str, float]]:
        settings = (*OWN_PROXY, "trainer.n_gpus_per_node=2")
        run = run_forked(services_job, f"together_{steps}", steps=steps, extra=settings)
        assert run.codes == (0, 0), run.output[-8000:]
        return [record["metrics"] for record in run.metrics()]

    return metrics


def assert_same(run: Run, wanted: list[dict[str, float]], steps: int) -> None:
    """Every recorded step, also one that was done twice."""
    records = run.metrics()
    assert {record["step"] for record in records} == {*range(1, steps + 1)}
    for record in records:
        found, expected = record["metrics"], wanted[record["step"] - 1]
        assert {n: found[n] for n in LOSSES} == pytest.approx(
            {n: expected[n] for n in LOSSES}, **EQUAL
        )
        # The engine has the weights of each update.
        assert found["rollout/probs_diff_mean"] < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_hosts_for_engines_and_sandboxes_alone(
    services_job: Job, one_host: Callable[[int], list[dict[str, float]]], engine: str
) -> None:
    cache_size = (f"{_R}kv_cache_gib=0.2",) if engine == "vllm" else ()
    extra = (*APART, f"{_R}name={engine}", *cache_size)
    with services_job.launch(engine, steps=2, extra=extra, hosts=4, ranks=1, preloaded=True) as run:
        assert run.ends(SLOW) == 0, run.output()[-8000:]
    assert "rollout on ranks 2; sandbox on ranks 3" in run.output()
    assert_same(run, one_host(2), 2)


@pytest.mark.long
def test_services_that_die_are_started_again_by_their_hosts(
    services_job: Job, one_host: Callable[[int], list[dict[str, float]]]
) -> None:
    with services_job.launch(
        "restarted", steps=STEPS, extra=APART, hosts=4, ranks=1, preloaded=True
    ) as run:
        killed = ((2, r"^engine|rollout\.server"), (3, r"^sandbox|ctrl_megatron\.sandbox"))
        for done, (rank, pattern) in enumerate(killed, 1):
            run.wait_for_steps(done)
            there = network_of(run.rank(rank))
            # The oldest is the actor's engine, and the sandbox's service.
            of_host = [(p.create_time(), p.pid, p) for p in run.look() if network_of(p) == there]
            named = [(" ".join((p.name(), *p.cmdline()[1:])), p) for *_, p in sorted(of_host)]
            found = [p for words, p in named if re.search(pattern, words)]
            assert found, named
            found[0].kill()
        assert run.ends(SLOW) == 0, run.output()[-8000:]
    assert_same(run, one_host(STEPS), STEPS)
    assert run.output().count("is started again (restart") == 2
    assert run.metrics()[-1]["metrics"]["engine/restarts"] >= 1


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_run_goes_on_after_each_kind_of_host_was_lost(
    services_job: Job, one_host: Callable[[int], list[dict[str, float]]]
) -> None:
    extra = (*APART, "trainer.save_freq=1")
    with services_job.launch(
        "lost", steps=STEPS, extra=extra, hosts=4, ranks=1, restarts=4, least=4
    ) as run:
        for number, host in enumerate("321"):
            # The step before is saved by then.
            run.wait_for(lambda: any(r["step"] == number + 2 for r in run.metrics()))  # noqa: B023
            for process in _of_host(run, host):
                process.kill()
            run.wait_for(lambda: len(starts(run)) > number, within=SLOW)  # noqa: B023
        assert run.ends(SLOW) == 0, run.output()[-8000:]
    for host in "123":
        named = rf"rank {host} on host host{host} (is lost|has not been heard of|died)"
        assert re.search(named, run.output()), run.output()[-8000:]
    assert_same(run, one_host(STEPS), STEPS)


def _of_host(run: Run, host: str) -> list[psutil.Process]:
    """The processes of a host below its launcher."""
    below = (p for p in run.look() if p.name() != "sh" and host_of(p) == host)
    return [p for p in below if "ctrl_megatron.commands.launcher" not in p.cmdline()]
