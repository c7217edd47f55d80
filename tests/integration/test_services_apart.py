"""Engines and sandboxes on ranks without a model: the run computes what it does with all on one
host."""

from __future__ import annotations

from dataclasses import replace

import golden_runs
import pytest
from forked_run import ForkedRun, run_forked
from launched_run import Job

pytestmark = pytest.mark.timeout(900)

_R, _P = "actor_rollout_ref.rollout.", "actor_rollout_ref.proxy."
TOGETHER = (*golden_runs.DRAWN, f"{_P}kind=engine", f"{_P}engine.name=hf")
APART = (*TOGETHER, f"{_R}placement=dedicated", f"{_R}weight_transport=nccl")
EQUAL = {"rel": 1e-5, "abs": 2e-7}
LOSSES = ("actor/loss", "actor/pg_loss", "actor/grad_norm", "reward/mean", "actor/entropy")


@pytest.fixture(scope="module")
def services_job(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return replace(job, folder=tmp_path_factory.mktemp("services") / "runs")


def forked(job: Job, name: str, ranks: int, *extra: str) -> ForkedRun:
    settings = (*extra, f"trainer.n_gpus_per_node={ranks}")
    run = run_forked(job, name, steps=3, extra=settings, ranks=ranks)
    assert run.codes == (0,) * ranks, run.output[-8000:]
    return run


def losses(run: ForkedRun) -> list[dict[str, float]]:
    return [{name: step[name] for name in LOSSES} for step in (r["metrics"] for r in run.metrics())]


def test_ranks_without_a_model_serve_the_others(services_job: Job) -> None:
    """Of four ranks of a host two train, one has the engines and one the sandbox."""
    together = losses(forked(services_job, "together", 2, *TOGETHER))
    places = ("placement.rollout=[2]", "placement.sandbox=[3]")
    run = forked(services_job, "apart", 4, *APART, *places)
    apart = losses(run)
    assert len(apart) == 3
    for found, wanted in zip(apart, together, strict=True):
        assert found == pytest.approx(wanted, **EQUAL)
    assert "rollout on ranks 2; sandbox on ranks 3" in run.output
    for record in run.metrics():
        assert record["metrics"]["rollout/probs_diff_mean"] < 1e-4
