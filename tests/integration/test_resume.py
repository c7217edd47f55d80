"""A run that was killed or stopped goes on as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal

import pytest
from launched_run import Job, Run
from pytest import approx

# A busy machine may be several times slower than an idle one.
pytestmark = pytest.mark.timeout(900)

SAME = ("actor/loss", "actor/grad_norm", "actor/kl_loss", "critique/length", "reward/mean")


def assert_same_steps(run: Run, whole: Run, rel: float = 1e-6) -> None:
    """Every recorded step, also one that was done twice, has the uninterrupted run's numbers."""
    expected = {record["step"]: record["metrics"] for record in whole.metrics()}
    for record in run.metrics():
        step, found = record["step"], record["metrics"]
        if step in expected:
            wanted = {name: approx(expected[step][name], rel=rel) for name in SAME}
            assert {name: found[name] for name in SAME} == wanted, f"step {step}"


@pytest.mark.long
def test_a_killed_run_repeats_the_uninterrupted_one(job: Job, whole_run: Run) -> None:
    saving = ("trainer.save_freq=1",)
    with job.launch("killed", steps=4, extra=saving, preloaded=True) as run:
        run.wait_for_steps(2)
        run.kill()
    done = [record["step"] for record in run.metrics()]
    assert done[-1] < 4
    # Each step reports the save before it.
    told = ["checkpoint/blocked_seconds" in record["metrics"] for record in run.metrics()]
    assert told == [False] + [True] * (len(told) - 1)
    with job.launch("killed", steps=4, extra=saving, preloaded=True) as again:
        assert again.ends() == 0, again.output()[-8000:]
    start = re.search(r"continuing from \S+ after step (\d+)", again.output())
    # Megatron says so when the ranks' optimizers have counted different steps.
    assert "common state dict differs" not in again.output()
    assert start and int(start[1]) in (done[-1] - 1, done[-1]), again.output()[-8000:]
    assert [r["step"] for r in again.metrics()] == [*done, *range(int(start[1]) + 1, 5)]
    assert_same_steps(again, whole_run)
    # Two are kept, and nothing that the killed run had half written.
    kept = sorted(path.name for path in (again.folder / "checkpoints").iterdir())
    assert kept == ["global_step_3", "global_step_4"]


@pytest.mark.long
def test_another_number_of_data_ranks_draws_the_same(job: Job, whole_run: Run) -> None:
    for ranks, steps in ((2, 1), (1, 3), (2, 4)):
        given = (f"trainer.n_gpus_per_node={ranks}",)
        with job.launch("elastic", steps=steps, extra=given, ranks=ranks, preloaded=True) as run:
            assert run.ends() == 0, run.output()[-8000:]
    assert [record["step"] for record in run.metrics()] == [1, 2, 3, 4]
    assert_same_steps(run, whole_run, rel=1e-5)


def test_ctrl_c_saves_and_the_run_can_go_on(job: Job, whole_run: Run) -> None:
    saving = ("trainer.save_freq=1", "trainer.async_save=true", "trainer.save_hf_freq=1")
    with job.launch("stopped", steps=10_000, extra=saving, preloaded=True) as run:
        run.wait_for_steps(2)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.ends() != 0
        assert run.look() == [] and run.shared_memory() == []
    said = re.search(r"stopped as asked; the state after step (\d+) is saved", run.output())
    assert said, run.output()[-8000:]
    step = int(said[1])
    assert [record["step"] for record in run.metrics()] == list(range(1, step + 1))
    assert (run.folder / f"checkpoints/global_step_{step}/trainer_state.json").is_file()
    assert (run.folder / "report.html").is_file()
    for done in range(1, step):
        assert (run.folder / f"hf_exports/global_step_{done}/model.safetensors").is_file()
    assert "stops because" not in run.output()
    with job.launch("stopped", steps=step + 1, preloaded=True) as again:
        assert again.ends() == 0, again.output()[-8000:]
    assert [record["step"] for record in again.metrics()] == list(range(1, step + 2))
    assert_same_steps(again, whole_run)
