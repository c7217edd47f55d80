"""Coupled GRPO on a start made from a Llama: it trains, resumes, and its reference follows."""

from __future__ import annotations

import pytest
from forked_run import ForkedRun, run_forked
from golden_runs import COUPLED, NO_PROGRAMS, STARTS, TWICE
from launched_run import Job

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def dream(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return STARTS["denoiser"](job, tmp_path_factory.mktemp("dream"))


def ran(job: Job, name: str, steps: int, *extra: str, ranks: int = 1) -> ForkedRun:
    run = run_forked(
        job,
        name,
        steps=steps,
        extra=(*COUPLED, *extra),
        without=NO_PROGRAMS,
        draws=True,
        ranks=ranks,
    )
    assert run.codes == (0,) * ranks, run.output[-8000:]
    return run


def test_a_step_trains_and_is_reported(dream: Job) -> None:
    run = ran(dream, "coupled", 1, "trainer.n_gpus_per_node=1")
    (metrics,) = (record["metrics"] for record in run.metrics())
    assert metrics["actor/grad_norm"] > 0 and metrics["actor/ppo_kl_first"] == 0
    assert not any(name.startswith("rollout/") for name in metrics)
    assert (run.folder / "report.html").is_file()


@pytest.mark.long
def test_three_steps_on_two_ranks_resume_exactly_and_the_reference_follows(dream: Job) -> None:
    whole = ran(dream, "coupled_whole", 3, *TWICE, ranks=2)
    ran(dream, "coupled_cut", 2, *TWICE, ranks=2)
    cut = ran(dream, "coupled_cut", 3, *TWICE, ranks=2)
    steps, again = ([r["metrics"] for r in run.metrics()] for run in (whole, cut))
    assert len(steps) == len(again) == 3
    for one, other in zip(steps, again, strict=True):
        for name in ("actor/loss", "actor/kl_loss", "actor/grad_norm", "reward/mean"):
            assert one[name] == other[name], name
        # The second pass has masks of its own, which the old scores share.
        assert abs(one["actor/ppo_kl_first"]) < 1e-6 < abs(one["actor/ppo_kl"])
    # Passes are packed in ways of their own, which round in ways of their own.
    assert steps[0]["actor/kl_to_reference"] < 1e-6 < steps[1]["actor/kl_to_reference"]
    folder = whole.folder / "checkpoints/global_step_3"
    assert (folder / "reference").is_dir() and (folder / "policy").is_dir()
    assert "Reward" in (whole.folder / "report.html").read_text()
