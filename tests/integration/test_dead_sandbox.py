"""A sandbox that dies within a run: nothing is learned from the step, and the run can go on."""

from __future__ import annotations

from pathlib import Path

from forked_run import run_forked
from in_process import in_process
from launched_run import Job
from scripted_sandbox import Sandbox, always, once_written, serving, three_of_ten

SERVICE, WRONG_INPUT = 14, 2
_OWN = ("sandbox.workers",)
_LIMIT = "programs could not be judged, and reward.max_failed_share=0.2"


def settings(address: str) -> tuple[str, ...]:
    return (f"sandbox.endpoint={address}", "reward.judging_retries=0", "trainer.save_freq=-1")


def saved_steps(folder: Path) -> set[int]:
    states = (folder / "checkpoints").glob("global_step_*/trainer_state.json")
    return {int(path.parent.name.rpartition("_")[2]) for path in states}


def test_a_sandbox_that_dies_ends_the_run_before_anything_is_learned(job: Job) -> None:
    # Three of ten requests are lost, and asked again: nothing that they concern is lost.
    with serving(Sandbox("500", three_of_ten)) as address:
        whole = run_forked(job, "passed", steps=2, extra=settings(address), without=_OWN)
    assert whole.codes == (0, 0), whole.output[-4000:]
    for record in whole.metrics():
        metrics = record["metrics"]
        assert metrics["reward/judged_rate"] == 1.0
        # Every program passes, so that only critiques without a judgment earn 0.
        assert metrics["reward/mean"] == metrics["critique/valid_rate"] > 0
    # The metrics of a step are written when it has ended.
    dying = once_written(job.folder / "broken" / "metrics.jsonl")
    with serving(Sandbox("empty", dying)) as address:
        broken = run_forked(job, "broken", steps=2, extra=settings(address), without=_OWN)
    assert broken.codes == (SERVICE, SERVICE), broken.output[-4000:]
    assert [record["step"] for record in broken.metrics()] == [1]
    assert broken.output.count(_LIMIT) == 1
    assert "the sandbox answered with 0 verdict(s)" in broken.output
    assert "Traceback" not in broken.output
    assert saved_steps(broken.folder) == {1}
    # Repaired, the run draws the rows of the lost step and ends as if nothing had happened.
    with serving(Sandbox()) as address:
        resumed = run_forked(job, "broken", steps=2, extra=settings(address), without=_OWN)
    assert resumed.codes == (0, 0), resumed.output[-4000:]
    compared = ("actor/loss", "actor/grad_norm", "reward/mean", "critique/length")
    for ours, theirs in zip(resumed.metrics(), whole.metrics(), strict=True):
        assert {n: ours["metrics"][n] for n in compared} == {
            n: theirs["metrics"][n] for n in compared
        }


def test_a_dead_sandbox_ends_a_run_with_a_greedy_baseline(job: Job) -> None:
    extra = "algorithm.adv_estimator=remax"
    with serving(Sandbox("empty", always)) as address:
        run = run_forked(job, "dead", steps=1, extra=(*settings(address), extra), without=_OWN)
    assert run.codes == (SERVICE, SERVICE), run.output[-4000:]
    assert run.output.count(_LIMIT) == 1 and "Traceback" not in run.output
    assert saved_steps(run.folder) == set()


def test_an_evaluation_with_a_dead_sandbox_prints_no_number(job: Job, tmp_path: Path) -> None:
    kept = [o for o in job.overrides("evaluated", 1) if not o.startswith(("data.val", *_OWN))]
    out = tmp_path / "out"
    with serving(Sandbox("empty", always)) as address:
        overrides = [*kept, f"data.val_files={job.data}", *settings(address)[:2]]
        words = ["--config", "examples/ctrl_smollm2_cpu.yaml", f"mine={job.actor}"]
        words += ["--out", str(out), "--set", *overrides]
        ended = in_process("run_command", code=SERVICE, name="evaluate", arguments=words)
    assert ended["log"].count(_LIMIT) == 1 and "Traceback" not in ended["log"]
    assert not list(out.glob("*/*.jsonl"))


def test_a_reward_that_is_never_known_is_named_once(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def never(items):\n    return [None] * len(items)\n")
    extra = (f"reward.reward_funcs=[critic,{file}:never]", "algorithm.filter_groups.enable=true")
    with serving(Sandbox()) as address:
        run = run_forked(job, "never", steps=1, extra=(*settings(address), *extra), without=_OWN)
    assert run.codes == (WRONG_INPUT, WRONG_INPUT), run.output[-4000:]
    assert run.output.count("returned None for every item of the step") == 1
    assert "Traceback" not in run.output
