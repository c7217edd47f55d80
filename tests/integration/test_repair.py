"""Runs in which the actor writes programs, reads their test results, and writes them again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from forked_run import ForkedRun, run_forked
from golden_runs import DRAWN, NO_REVISIONS, REPAIR, STARTS
from launched_run import Job

from ctrl_megatron.metrics import read_json_lines

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def solver(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A model that writes a right and a wrong program about as often."""
    folder = tmp_path_factory.mktemp("repair")
    return replace(STARTS["solver"](job, folder), folder=folder / "runs")


def run(job: Job, name: str, *, steps: int, extra: tuple[str, ...] = ()) -> ForkedRun:
    done = run_forked(job, name, steps=steps, extra=(*DRAWN, *REPAIR, *extra), without=NO_REVISIONS)
    assert done.codes == (0, 0), done.output[-8000:]
    return done


def test_programs_are_repaired_and_the_answers_are_trained_on(solver: Job) -> None:
    validation = (f"data.val_files={solver.data}", "data.val_batch_size=4")
    done = run(solver, "short", steps=3, extra=validation)
    steps = [record["metrics"] for record in done.metrics()]
    trained = [step for step in steps if "actor/grad_norm" in step]
    assert len(trained) == 3
    for metrics in trained:
        assert metrics["actor/grad_norm"] > 0 and 0 < metrics["reward/mean"] <= 1
        assert 1 < metrics["episode/turns"] <= 3
        # Several answers of at most 12 tokens, and more tokens of replies than of answers.
        assert metrics["response/length"] <= 12 * metrics["episode/turns"]
        assert metrics["episode/observed_tokens"] > metrics["response/length"]
        # Log-probs over rows with observations are those of the engine, token by token.
        assert metrics["rollout/probs_diff_max"] < 1e-3
    assert any(metrics["episode/gain"] > 0 for metrics in trained)
    assert any("val/episode_score" in metrics for metrics in steps)
    said = [example["episode"] for example in read_json_lines(done.folder / "examples.jsonl")]
    assert any("Your program fails 1 of 1 tests." in text for text in said)


@pytest.mark.long
def test_a_run_of_episodes_continues_as_if_it_had_not_stopped(solver: Job) -> None:
    def computed(done: ForkedRun) -> list[dict[str, Any]]:
        names = ("actor/", "reward/", "episode/", "response/")
        return [
            {n: v for n, v in record["metrics"].items() if n.startswith(names)}
            for record in done.metrics()
        ]

    whole = computed(run(solver, "whole", steps=4))
    run(solver, "stopped", steps=2)
    assert computed(run(solver, "stopped", steps=4)) == whole and len(whole) == 4
