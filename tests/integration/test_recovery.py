"""Engines and sandboxes that die within a run are started again, and the run computes the same."""

from __future__ import annotations

import re

import pytest
from forked_run import run_forked
from launched_run import Job, Run

pytestmark = pytest.mark.timeout(900)

ENGINE, SANDBOX = r"^engine|rollout\.server", r"ctrl_megatron\.sandbox"
COMPARED = ("actor/loss", "actor/grad_norm", "reward/mean", "critique/length", "pass_rate/after")


def kill(run: Run, pattern: str) -> int:
    """Kill the newest process that matches; its id."""
    found = [p for p in run.look() if re.search(pattern, " ".join([p.name(), *p.cmdline()]))]
    victim = min(found, key=lambda p: (p.create_time(), p.pid))
    victim.kill()
    return victim.pid


def test_a_run_whose_engine_and_sandbox_die_computes_what_it_would_have(job: Job) -> None:
    steps = 4
    whole = run_forked(job, "undisturbed", steps=steps)
    assert whole.codes == (0, 0), whole.output[-4000:]
    with job.launch("disturbed", steps=steps, preloaded=True) as run:
        run.wait_for_steps(1)
        run.wait_for(lambda: bool(run.shared_memory()), pause=0.0005)
        pushed_to = kill(run, ENGINE)
        run.wait_for_steps(2)
        judged = kill(run, SANDBOX)
        run.wait_for_steps(3)
        drew = kill(run, ENGINE)
        assert run.ends() == 0, run.output()[-8000:]
        assert run.look() == []
    print(run.output()[-6000:])
    assert pushed_to != drew
    for pid in (pushed_to, drew, judged):
        assert re.search(rf"is started again .*pid {pid}\) died", run.output())
    for ours, theirs in zip(run.metrics(), whole.metrics(), strict=True):
        assert {n: ours["metrics"][n] for n in COMPARED} == {
            n: theirs["metrics"][n] for n in COMPARED
        }
    assert run.metrics()[-1]["metrics"]["engine/restarts"] == 2
    assert run.metrics()[-1]["metrics"]["sandbox/restarts"] == 1
