"""The device has one owner at a time, in every training, through stop, resume and validation."""

from __future__ import annotations

from pathlib import Path

import golden_runs
import pytest
from forked_run import run_forked
from launched_run import Job

pytestmark = pytest.mark.timeout(900)

MEGATRON = "actor_rollout_ref.actor.megatron."
LEAVING = tuple(f"{MEGATRON}{part}_offload=true" for part in ("param", "grad", "optimizer"))
ALGORITHMS = {"grpo": (), "ppo": golden_runs.RL["ppo"]}


def events_of(folder: Path) -> list[list[str]]:
    """What each rank noted."""
    return [(folder / str(rank)).read_text().splitlines() for rank in (0, 1)]


def assert_one_owner(events: list[str], *, drives_engine: bool) -> None:
    """Nothing of the trainer happens while the engine is awake, and no engine wakes into memory
    that an allocator holds back."""
    asleep: set[str] = set()
    for number, event in enumerate(events):
        before, (name, *rest) = events[max(0, number - 1)], event.split()
        if name == "sleep":
            assert not asleep, f"event {number}"
            asleep = {"weights", "kv_cache"}
        elif name == "wake":
            assert before == "empty", f"event {number}: {before} before {event}"
            assert rest == ["weights"] or "weights" not in asleep, f"event {number}"
            asleep -= set(rest)
        elif name == "push":
            assert "weights" not in asleep, f"event {number}"
        elif name == "generate":
            assert not asleep, f"event {number}"
        elif name in ("build", "pass", "onload", "save", "load") and drives_engine:
            # A save finds the engine asleep or lets it sleep first.
            awake = not asleep and not (name in ("save", "load") and "sleep" in events[number + 1])
            assert not awake, f"event {number}: {event} while the engine is awake"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_reinforcement_learning(job: Job, tmp_path: Path, name: str) -> None:
    extra = (*ALGORITHMS[name], *LEAVING, f"data.val_files={job.data}", "trainer.test_freq=1")
    started, resumed = tmp_path / "started", tmp_path / "resumed"
    # Validation and the first step draw twice each; the third draw of the two is the second step's.
    first = run_forked(
        job,
        f"phases_{name}",
        steps=2,
        extra=(*extra, "trainer.val_before_train=true"),
        phases=started,
        stop_at=7,
    )
    assert first.codes == (130, 130), first.output[-8000:]
    again = run_forked(job, f"phases_{name}", steps=2, extra=extra, phases=resumed)
    assert again.codes == (0, 0), again.output[-8000:]
    for folder in (started, resumed):
        mine, other = events_of(folder)
        assert_one_owner(mine, drives_engine=True)
        assert_one_owner(other, drives_engine=False)
        # Both generate; one drives the engine that they share.
        assert not [event for event in other if event.startswith(("sleep", "wake", "push"))]
        for part in ("build", "pass", "onload", "offload", "empty"):
            # Ranks that drive no engine make the same room, in the same order.
            assert mine.count(part) == other.count(part) > 0
        assert {"sleep 2", "wake weights", "wake kv_cache", "push", "generate"} <= set(mine)
        assert mine[0] == "sleep 2" and mine[1] == "build"
    assert events_of(started)[0][-10:].count("save") == 1, "saved when it was stopped"
    resumed_events = events_of(resumed)[0]
    assert resumed_events.index("load") < resumed_events.index("generate")
    assert resumed_events.count("save") == 1


def test_fine_tuning(job: Job, tmp_path: Path) -> None:
    path = golden_runs.sft_examples(tmp_path / "sft.parquet")
    for steps in (1, 2):
        folder = tmp_path / str(steps)
        run = run_forked(
            job,
            "phases_sft",
            steps=steps,
            extra=(f"sft.train_files={path}",),
            purpose="sft",
            phases=folder,
        )
        assert run.codes == (0, 0), run.output[-8000:]
        for events in events_of(folder):
            assert events == ["build", *(["load"] if steps == 2 else []), "pass", "save"]
