"""Runs whose rows have several tasks: critiques with revisions, judging and solving."""

from __future__ import annotations

from typing import Any

import pytest
from forked_run import ForkedRun, run_forked
from golden_runs import DRAWN
from launched_run import Job
from tiny_run import JUDGMENTS, PROGRAM, chain_model, smollm2, write_problems

from ctrl_megatron.data.rows import read_rows, write_rows
from ctrl_megatron.preparation.task_rows import make_judging_rows, make_solving_rows

MIXED = (
    "data.train_batch_size=6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=6",
    "actor_rollout_ref.rollout.n=4",
    "data.mixture=[4,1,1]",
    "data.val_files=[]",
    "reward.reward_funcs=[critic,code,judge]",
    "reward.reward_tasks={critic: [critique], code: [solving], judge: [judging]}",
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("mixture")
    source = smollm2(folder)
    rows = read_rows(write_problems(folder / "train.parquet"))
    write_rows(folder / "judging.parquet", make_judging_rows(rows))
    write_rows(folder / "solving.parquet", make_solving_rows(rows))
    return Job(
        actor=chain_model(folder / "actor", source, [*JUDGMENTS, PROGRAM], 0.8),
        proxy=chain_model(folder / "proxy", source, [PROGRAM], 0.9),
        data=folder / "train.parquet",
        folder=folder / "runs",
    )


def run(job: Job, name: str, *, steps: int, extra: tuple[str, ...] = ()) -> ForkedRun:
    data = [job.data, *(job.data.with_name(f"{task}.parquet") for task in ("judging", "solving"))]
    files = f"data.train_files=[{','.join(map(str, data))}]"
    done = run_forked(job, name, steps=steps, extra=(*DRAWN, *MIXED, files, *extra))
    assert done.codes == (0, 0), done.output[-8000:]
    return done


def metrics_of(done: ForkedRun) -> list[dict[str, Any]]:
    return [record["metrics"] for record in done.metrics()]


@pytest.mark.long
def test_three_tasks_in_one_run_have_their_shares_and_rewards(mixed: Job) -> None:
    for metrics in metrics_of(run(mixed, "short", steps=2)):
        shares = [metrics[f"task/{task}/share"] for task in ("critique", "judging", "solving")]
        assert shares == pytest.approx([4 / 6, 1 / 6, 1 / 6])
        parts = ("critic", "judge", "code")
        earned = [metrics["reward/mean" if p == "critic" else f"reward/{p}"] for p in parts]
        tasks = [metrics[f"task/{task}/reward"] for task in ("critique", "judging", "solving")]
        assert tasks == pytest.approx(earned)


@pytest.mark.long
def test_a_mixture_continues_with_the_same_rows_and_losses(mixed: Job) -> None:
    whole = metrics_of(run(mixed, "whole", steps=30))
    run(mixed, "resumed", steps=11)
    resumed = metrics_of(run(mixed, "resumed", steps=30))
    assert len(whole) == 30
    for one, other in zip(whole, resumed, strict=True):
        for name in ("actor/loss", "actor/grad_norm", "reward/total", "task/solving/length"):
            assert one[name] == other[name], name
