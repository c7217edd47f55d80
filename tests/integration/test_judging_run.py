"""A run with two rewards, a schedule of their weights and a reference per stage: every step has the
weights of its stage, and a resumed run repeats the uninterrupted one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked_run import run_forked
from launched_run import Job

pytestmark = pytest.mark.timeout(900)

STAGES = (
    "[{from_step: 1, weights: {critic: 0, judge: 1}}, "
    "{from_step: 3, weights: {critic: 1, judge: 0.5}}]"
)
JUDGING = (
    *("algorithm.adv_estimator=gdpo", "reward.judge.weight=0.5", "reward.judge.wrong=-1"),
    *("reward.judge.unreadable=-1", f"reward.schedule={STAGES}"),
    *("actor_rollout_ref.ref.sync_at=[2]", "actor_rollout_ref.actor.use_kl_loss=true"),
    *("algorithm.filter_groups.enable=false", "trainer.save_freq=2"),
)


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["metrics"] for record in records}


def lasting(metrics: dict[str, float]) -> dict[str, float]:
    """What does not depend on the clock or the machine."""
    changing = ("time/", "perf/", "memory/", "sync/", "checkpoint/", "sandbox/", "engine/")
    # The cache of verdicts is in memory.
    changing += ("reward/cached_rate",)
    return {name: value for name, value in metrics.items() if not name.startswith(changing)}


@pytest.mark.long
def test_stages_change_the_weights_and_a_resumed_run_is_exact(job: Job) -> None:
    whole = run_forked(job, "judging_whole", steps=4, extra=JUDGING)
    assert whole.codes == (0, 0), whole.output[-8000:]
    found = metrics_of(job.folder / "judging_whole")
    for step, metrics in found.items():
        judge, critic = metrics["reward/judge"], metrics["reward/mean"]
        total = judge if step < 3 else critic + 0.5 * judge
        assert metrics["reward/total"] == pytest.approx(total, abs=1e-6), step
    # The reference became the actor after step 2.
    moved = [found[step]["actor/kl_to_reference"] != 0 for step in (1, 2, 3, 4)]
    assert moved == [False, True, False, True]
    for steps in (2, 4):
        part = run_forked(job, "judging_parts", steps=steps, extra=JUDGING)
        assert part.codes == (0, 0), part.output[-8000:]
    again = metrics_of(job.folder / "judging_parts")
    assert sorted(again) == [1, 2, 3, 4]
    for step in found:
        assert lasting(again[step]) == lasting(found[step]), step
