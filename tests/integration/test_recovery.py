"""Engines and sandboxes that die within a run are started again, and the run computes the same."""

from __future__ import annotations

import re
from typing import Any

import golden_runs
import psutil
import pytest
from forked_run import run_forked
from launched_run import Job, Run

from ctrl_megatron.rollout.engine import available_engines

pytestmark = pytest.mark.timeout(900)

ENGINE, SANDBOX = r"^engine|rollout\.server", r"ctrl_megatron\.sandbox"
COMPARED = ("actor/loss", "actor/grad_norm", "reward/mean", "critique/length", "pass_rate/after")
R = "actor_rollout_ref.rollout."


def services(run: Run, pattern: str) -> list[psutil.Process]:
    """The processes that match, without those that are below one: an engine's guard, a fork of it,
    and the sandbox's workers."""
    found = [p for p in run.look() if re.search(pattern, " ".join([p.name(), *p.cmdline()]))]
    return [p for p in found if p.ppid() not in {q.pid for q in found}]


def hurt(run: Run, pattern: str, *, silent: bool = False) -> int:
    """Kill or suspend the newest process that matches; its id."""
    victim = max(services(run, pattern), key=lambda p: (p.create_time(), p.pid))
    victim.suspend() if silent else victim.kill()
    return victim.pid


def compared(steps: list[dict[str, Any]]) -> list[dict[str, float]]:
    """A step without a judged revision lacks some metrics."""
    return [{n: step["metrics"][n] for n in COMPARED if n in step["metrics"]} for step in steps]


def test_a_run_whose_engine_and_sandbox_die_computes_what_it_would_have(job: Job) -> None:
    """``golden_runs`` recorded the run that nobody disturbed."""
    recorded = golden_runs.load("ctrl_grpo")
    steps, extra = golden_runs.STEPS, golden_runs.DRAWN
    with job.launch("disturbed", steps=steps, extra=extra, preloaded=True) as run:
        run.wait_for_steps(1)
        run.wait_for(lambda: bool(run.shared_memory()), pause=0.0005)
        engine = hurt(run, ENGINE)
        run.wait_for_steps(2)
        sandbox = hurt(run, SANDBOX)
        assert run.ends() == 0, run.output()[-8000:]
        assert run.look() == [] and run.shared_memory() == []
    for pid in (engine, sandbox):
        assert run.output().count(f"(pid {pid}) died") == 1
        assert re.search(rf"is started again \(restart 1, .*pid {pid}\) died", run.output())
    last = run.metrics()[-1]["metrics"]
    assert last["engine/restarts"] == last["sandbox/restarts"] == 1
    found, wanted = compared(run.metrics()), compared(recorded["steps"])
    if recorded["machine"] != golden_runs.machine():
        wanted = [pytest.approx(step, **golden_runs.DIFFERENT_MACHINE) for step in wanted]
    assert found == wanted


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "silent", "extra"),
    [
        (ENGINE, True, ()),
        (SANDBOX, True, ()),
        (ENGINE, False, ("actor_rollout_ref.actor.megatron.param_offload=true",)),
        (ENGINE, False, (f"{R}placement=dedicated", f"{R}n_gpus_per_node=1")),
        # The others draw what the lost one was asked for.
        (ENGINE, False, (f"{R}n_gpus_per_node=2",)),
    ],
    ids=["silent engine", "silent sandbox", "offloaded", "dedicated", "one of two"],
)
def test_other_ends_change_nothing_either(
    job: Job, request: pytest.FixtureRequest, victim: str, silent: bool, extra: tuple[str, ...]
) -> None:
    name = request.node.callspec.id.replace(" ", "_")
    whole = run_forked(job, f"{name}_whole", steps=4, extra=extra)
    assert whole.codes == (0, 0), whole.output[-4000:]
    patient = (*extra, "trainer.failure_timeout=8")
    with job.launch(name, steps=4, extra=patient, preloaded=True) as run:
        for step in (1, 2):
            run.wait_for_steps(step)
            hurt(run, victim, silent=silent)
        assert run.ends() == 0, run.output()[-8000:]
        assert run.look() == [] and run.shared_memory() == []
    # An engine that lives is started again too if another one dies within their common push.
    assert run.output().count("is started again") >= 2
    assert compared(run.metrics()) == compared(whole.metrics())


@pytest.mark.long
def test_draws_ahead_that_are_lost_come_from_younger_weights(job: Job) -> None:
    extra = (f"{R}placement=dedicated", f"{R}n_gpus_per_node=1", f"{R}staleness=1")
    extra += ("algorithm.rollout_correction.rollout_is=token",)
    with job.launch("ahead", steps=5, extra=extra, preloaded=True) as run:
        for step in (1, 3):
            run.wait_for_steps(step)
            hurt(run, ENGINE)
        assert run.ends() == 0, run.output()[-8000:]
        assert run.look() == []
    ages = [record["metrics"]["rollout/staleness"] for record in run.metrics()]
    assert len(ages) == 5 and set(ages) <= {0.0, 1.0}


@pytest.mark.long
def test_a_proxy_with_engines_of_its_own_comes_back(job: Job) -> None:
    extra = ("actor_rollout_ref.proxy.kind=engine", "actor_rollout_ref.proxy.engine.name=hf")
    extra += ("actor_rollout_ref.proxy.engine.threads=1",)
    whole = run_forked(job, "proxy_whole", steps=3, extra=extra)
    assert whole.codes == (0, 0), whole.output[-4000:]
    with job.launch("proxy", steps=3, extra=extra, preloaded=True) as run:
        run.wait_for_steps(1)
        killed = services(run, ENGINE)
        for process in killed:
            process.kill()
        assert run.ends() == 0, run.output()[-8000:]
    assert len(killed) == 2 and run.output().count("is started again") == 2
    assert compared(run.metrics()) == compared(whole.metrics())


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "core"), [("vllm", "EngineCore"), ("sglang", "sglang::scheduler")]
)
def test_engines_that_compute_in_several_processes_come_back(
    job: Job, engine: str, core: str
) -> None:
    """Every push compares checksums, and every text its version."""
    if engine not in available_engines():
        pytest.skip(f"{engine} is not installed; `make env` brings it")
    extra = (f"{R}name={engine}", f"{R}kv_cache_gib=0.1")
    with job.launch(engine, steps=4, extra=extra, preloaded=True) as run:
        run.wait_for_steps(1)
        hurt(run, core)
        run.wait_for_steps(2)
        hurt(run, r"rollout\.server")
        assert run.ends(500) == 0, run.output()[-8000:]
        assert run.look() == [] and run.shared_memory() == []
    assert run.output().count("is started again") == 2
    assert [record["step"] for record in run.metrics()] == [1, 2, 3, 4]
    assert all(r["metrics"]["rollout/probs_diff_max"] < 1e-3 for r in run.metrics())
