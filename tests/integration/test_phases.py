"""The device has one owner at a time, in every training, through stop, resume and validation.

What is saved with the package's layers and torch's AdamW goes on with stand-ins for Transformer
Engine's.
"""

from __future__ import annotations

from pathlib import Path

import golden_runs
import pytest
from forked_run import run_forked
from launched_run import Job

pytestmark = pytest.mark.timeout(900)

MEGATRON = "actor_rollout_ref.actor.megatron."
LEAVING = tuple(f"{MEGATRON}{part}_offload=true" for part in ("param", "grad", "optimizer"))


def events_of(folder: Path) -> list[list[str]]:
    """The notes of each rank."""
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
        elif name in ("build", "pass", "onload", "load") and drives_engine:
            # A load lets the engine sleep first.
            awake = not asleep and not (name == "load" and "sleep" in events[number + 1])
            assert not awake, f"event {number}: {event} while the engine is awake"


def train(
    job: Job,
    name: str,
    phases: Path,
    *,
    extra: tuple[str, ...],
    stop_at: int = 0,
    te: bool = False,
) -> list[str]:
    """The notes of the first rank of a run of two steps; with ``stop_at`` it is stopped."""
    given = (*extra, *LEAVING, f"data.val_files={job.data}", "trainer.test_freq=1")
    run = run_forked(job, name, steps=2, extra=given, phases=phases, stop_at=stop_at, te=te)
    assert run.codes == ((130, 130) if stop_at else (0, 0)), run.output[-8000:]
    mine, other = events_of(phases)
    assert_one_owner(mine, drives_engine=True)
    assert_one_owner(other, drives_engine=False)
    # Both generate; one drives the engine that they share.
    assert not [event for event in other if event.startswith(("sleep", "wake", "push"))]
    for part in ("build", "pass", "onload", "offload", "empty"):
        # A rank that drives no engine makes the same room.
        assert mine.count(part) == other.count(part) > 0
    assert {"sleep 2", "wake weights", "wake kv_cache", "push", "generate"} <= set(mine)
    assert mine[:2] == ["sleep 2", "build"]
    return mine


@pytest.mark.long
def test_grpo_is_stopped_in_a_generation_and_resumed(job: Job, tmp_path: Path) -> None:
    # Validation, a step and validation draw critiques and revisions each; then the second step.
    before = ("trainer.val_before_train=true",)
    started = train(job, "phases_grpo", tmp_path / "started", extra=before, stop_at=7)
    # From host memory: the engine keeps the device, and nothing comes back to it.
    assert started[-2:] == ["generate", "save"] and started.count("save") == 1
    resumed = train(job, "phases_grpo", tmp_path / "resumed", extra=(), te=True)
    assert resumed.index("load") < resumed.index("generate")
    assert resumed.count("save") == 1


def test_ppo_is_stopped_in_a_generation(job: Job, tmp_path: Path) -> None:
    ppo = golden_runs.RL["ppo"]
    started = train(job, "phases_ppo", tmp_path / "started", extra=ppo, stop_at=5, te=True)
    assert started.count("build") == 3
    assert started[-2:] == ["generate", "save"]


@pytest.mark.long
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
            te=steps == 2,
        )
        assert run.codes == (0, 0), run.output[-8000:]
        for events in events_of(folder):
            # A checkpoint needs no gradients; the next step allocates them again.
            loaded = ["load", "offload", "onload"] if steps == 2 else []
            assert events == ["build", *loaded, "pass", "save", "offload"]
