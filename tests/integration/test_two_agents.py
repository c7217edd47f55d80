"""``examples/two_agents.py``: two policies learn in the same steps, each with weights, updates and
versions of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_run import ForkedRun, run_forked
from golden_runs import DRAWN
from launched_run import Job
from safetensors.torch import load_file
from tiny_run import PROGRAM, chain_model

from ctrl_megatron.checkpoint.convert import megatron_to_hf
from ctrl_megatron.metrics import read_json_lines

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def solver(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the program that is right for seven of the eight problems, or a wrong one."""
    folder = tmp_path_factory.mktemp("solver") / "model"
    return chain_model(folder, smollm2_path, (PROGRAM, "print(6)"), 0.8)


@pytest.fixture(scope="module")
def pair_job(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return replace(job, folder=tmp_path_factory.mktemp("pairs") / "runs")


def settings(solver: Path, *extra: str) -> tuple[str, ...]:
    return (
        *DRAWN,
        "dag.custom_pipeline_fn=examples.two_agents:build",
        *("actor_rollout_ref.proxy.kind=agent1", f"agent1.model.path={solver}"),
        *("agent1.optim.lr=2e-3", "agent1.rollout.n=3"),
        *extra,
    )


def run_pair(job: Job, name: str, steps: int, *given: str, ranks: int = 1) -> ForkedRun:
    run = run_forked(
        job,
        name,
        steps=steps,
        extra=(*given, f"trainer.n_gpus_per_node={ranks}"),
        without=("actor_rollout_ref.proxy.model.path",),
        ranks=ranks,
    )
    assert run.codes == (0,) * ranks, run.output[-8000:]
    return run


def test_both_learn_and_every_text_is_drawn_by_the_right_weights(
    pair_job: Job, solver: Path, tmp_path: Path
) -> None:
    run = run_pair(pair_job, "both", 3, *settings(solver))
    print(run.output)
    steps: list[dict[str, Any]] = [record["metrics"] for record in run.metrics()]
    print(steps[0])
    assert len(steps) == 3
