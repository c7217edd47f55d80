"""Runs that learn from a teacher beside the rewards: resumed, and with the teacher elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked_run import ForkedRun, run_forked
from launched_run import Job
from replayed import replay

pytestmark = pytest.mark.timeout(900)

KEYS = "algorithm.distillation."
NO_KL = ("actor_rollout_ref.actor.use_kl_loss=false", "actor_rollout_ref.actor.entropy_coeff=0")
Steps = dict[int, dict[str, float]]


def taught(job: Job, *more: str) -> tuple[str, ...]:
    """Settings of a run whose teacher is the proxy's model, which says something else."""
    return (
        *(f"{KEYS}teacher=reference", f"actor_rollout_ref.ref.model.path={job.proxy}"),
        *(f"{KEYS}top_k=5", "algorithm.filter_groups.enable=false", "trainer.save_freq=2"),
        *("trainer.dump_steps=[3]", *more),
    )


def metrics_of(run: ForkedRun) -> Steps:
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["metrics"] for record in map(json.loads, lines)}


def lasting(metrics: dict[str, float]) -> dict[str, float]:
    """What does not depend on the clock or the machine."""
    changing = ("time/", "perf/", "memory/", "sync/", "checkpoint/", "sandbox/", "engine/")
    changing += ("reward/cached_rate",)
    return {name: value for name, value in metrics.items() if not name.startswith(changing)}


def finished(
    job: Job, name: str, extra: tuple[str, ...], *, steps: int = 3, ranks: int = 2
) -> Steps:
    run = run_forked(job, name, steps=steps, extra=(*NO_KL, *extra), ranks=ranks)
    assert run.codes == (0,) * ranks, run.output[-8000:]
    return metrics_of(run)


@pytest.fixture(scope="module")
def whole(job: Job) -> Steps:
    return finished(job, "taught", taught(job))


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.long)])
def test_the_actor_learns_from_a_teacher_and_a_resumed_run_is_exact(
    job: Job, whole: Steps, engine: str
) -> None:
    extra = taught(job, f"actor_rollout_ref.rollout.name={engine}")
    found = whole if engine == "hf" else finished(job, f"taught_{engine}", extra)
    for step in found.values():
        assert step["distillation/row_rate"] == 1 and step["distillation/left_out_rate"] == 0
        assert "actor/kl_to_reference" not in step
    # The critic moves towards a model that says nothing else than "print(7)".
    assert found[1]["actor/divergence"] > found[3]["actor/divergence"] > 0
    finished(job, f"taught_parts_{engine}", extra, steps=2)
    again = finished(job, f"taught_parts_{engine}", extra)
    for step in found:
        assert lasting(again[step]) == lasting(found[step]), step


@pytest.mark.parametrize(("ranks", "tensor"), [pytest.param(1, 1, marks=pytest.mark.long), (2, 2)])
def test_a_dumped_step_learns_the_same_again(
    job: Job, whole: Steps, tmp_path: Path, ranks: int, tensor: int
) -> None:
    dump = job.folder / "taught/dumps/global_step_3"
    arguments = [str(dump), "--update", "--tolerance=1e-5"]
    codes, said = replay(arguments, tmp_path / "log", ranks=ranks, tensor=tensor)
    assert codes == (0,) * ranks, said[-8000:]
    assert "actor/divergence" in said


@pytest.mark.long
def test_a_teacher_on_ranks_of_its_own_teaches_the_same(job: Job, whole: Steps) -> None:
    extra = taught(job, "placement.reference=[2]", "trainer.n_gpus_per_node=3")
    apart = finished(job, "taught_apart", extra, steps=2, ranks=3)
    for step, found in apart.items():
        for name in ("actor/divergence", "actor/loss", "actor/grad_norm"):
            assert found[name] == pytest.approx(whole[step][name], rel=1e-5, abs=1e-7), (step, name)


@pytest.mark.long
def test_a_policy_that_reads_no_hint_agrees_with_itself(job: Job) -> None:
    # The tiny model does not look at its prompt, so a hint changes nothing before an update.
    settings = (
        *(f"{KEYS}teacher=policy", f"{KEYS}estimator=full", f"{KEYS}policy_loss_coef=0"),
        *("algorithm.filter_groups.enable=false", f"{KEYS}on=groups_without_spread"),
    )
    (step,) = finished(job, "taught_itself", settings, steps=1).values()
    assert abs(step["actor/divergence"]) < 1e-6 and step["actor/grad_norm"] < 1e-4
    assert step["distillation/row_rate"] == pytest.approx(step["advantage/zero_std_rate"])
