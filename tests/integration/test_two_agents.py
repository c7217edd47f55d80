"""``examples/two_agents.py``: two policies learn in the same steps, each with weights, updates and
versions of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from forked_run import ForkedRun, run_forked
from golden_runs import DRAWN, PAIR, PROXY_MODEL, STARTS
from launched_run import Job
from safetensors.torch import load_file

from ctrl_megatron.checkpoint.convert import megatron_to_hf
from ctrl_megatron.metrics import read_json_lines

pytestmark = pytest.mark.timeout(900)

COMPUTED = ("actor/", "advantage/", "reward/", "rollout/", "pass_rate/", "critique/")
Runs = Callable[[int], ForkedRun]


@pytest.fixture(scope="module")
def solver(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the program that is right for seven of the eight problems, or a wrong one."""
    return STARTS["pair"](job, tmp_path_factory.mktemp("solver")).proxy


@pytest.fixture(scope="module")
def pair_job(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return replace(job, folder=tmp_path_factory.mktemp("pairs") / "runs")


@pytest.fixture(scope="module")
def runs(pair_job: Job, solver: Path) -> Runs:
    """The run of three steps on so many ranks, which runs once."""
    return cache(lambda ranks: run_pair(pair_job, solver, f"ranks_{ranks}", 3, ranks=ranks))


def run_pair(job: Job, solver: Path, name: str, steps: int, *, ranks: int) -> ForkedRun:
    run = run_forked(
        job,
        name,
        steps=steps,
        extra=(
            *(*DRAWN, *PAIR, f"agent1.model.path={solver}"),
            f"trainer.n_gpus_per_node={ranks}",
        ),
        without=(PROXY_MODEL,),
        ranks=ranks,
        draws=ranks > 1,
    )
    assert run.codes == (0,) * ranks, run.output[-8000:]
    return run


def computed(run: ForkedRun) -> list[dict[str, float]]:
    """What every step computed for both policies."""
    return [
        {
            name: value
            for name, value in record["metrics"].items()
            if name.removeprefix("agent1/").startswith(COMPUTED)
        }
        for record in run.metrics()
    ]


def largest_change(checkpoint: Path, folder: str, start: Path, out: Path) -> float:
    """The largest difference between a model of the checkpoint and the files it started from."""
    megatron_to_hf(checkpoint, out / folder, folder=folder)
    before, after = (load_file(path / "model.safetensors") for path in (start, out / folder))
    assert before.keys() == after.keys()
    return max(float((before[name] - after[name]).abs().max()) for name in before)


@pytest.mark.long
def test_both_learn_and_every_text_is_drawn_by_the_right_weights(
    runs: Runs, job: Job, solver: Path, tmp_path: Path
) -> None:
    """The trainer's log-probs of a text are the engine's only if the engine had the weights of the
    text's author; checksums of every push are compared too."""
    run = runs(1)
    steps = computed(run)
    assert len(steps) == 3
    for step in steps:
        for agent in ("", "agent1/"):
            assert step[f"{agent}actor/grad_norm"] > 0 and step[f"{agent}reward/judged_rate"] == 1
            assert step[f"{agent}rollout/probs_diff_max"] < 1e-4
    assert [step["actor/lr"] for step in steps] == [1e-3] * 3
    assert [step["agent1/actor/lr"] for step in steps] == [2e-3] * 3
    assert any(0 < step["agent1/reward/mean"] < 1 for step in steps)
    drawn: list[dict[str, Any]] = read_json_lines(run.folder / "examples.jsonl")
    critics = [one for one in drawn if one["agent"] == "actor"]
    solvers = [one for one in drawn if one["agent"] == "agent1"]
    assert [one["version"] for one in critics] == [f"actor@{step}" for step in range(3)]
    assert [one["version"] for one in solvers] == [f"agent1@{step}" for step in range(3)]
    assert {(one["step"], one["revised_by"]) for one in critics} <= {
        *((step, f"agent1@{step - 1}") for step in (1, 2, 3)),
        *((step, "") for step in (1, 2, 3)),
    }
    # The first push of each, then both after every update but the last one's.
    assert sum(record["metrics"]["sync/pushes"] for record in run.metrics()) >= 6
    checkpoint = run.folder / "checkpoints/global_step_3"
    assert largest_change(checkpoint, "policy", job.actor, tmp_path) > 1e-3
    assert largest_change(checkpoint, "agent1", solver, tmp_path) > 1e-3


@pytest.mark.long
def test_two_ranks_compute_what_one_does_and_the_report_shows_both(runs: Runs) -> None:
    alone, shared = computed(runs(1)), computed(runs(2))
    for number, (found, wanted) in enumerate(zip(shared, alone, strict=True), 1):
        known = {name: wanted[name] for name in found}
        assert found == pytest.approx(known, rel=1e-4, abs=1e-6), number
    report = (runs(2).folder / "report.html").read_text()
    assert "revised by: agent1@2" in report and "agent1/reward/mean" in report


@pytest.mark.long
def test_a_stopped_run_goes_on_like_one_that_was_not(
    pair_job: Job, solver: Path, runs: Runs
) -> None:
    for last in (1, 3):
        stopped = run_pair(pair_job, solver, "stopped", last, ranks=2)
    assert computed(stopped) == computed(runs(2))
