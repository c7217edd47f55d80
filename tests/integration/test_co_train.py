"""A critic and a solver of different families that learn in the same steps, or in turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from forked_run import ForkedRun, run_forked
from golden_runs import DRAWN, PROXY_MODEL
from launched_run import Job
from tiny_run import PROGRAM, byte_chat_model

pytestmark = pytest.mark.timeout(900)

_OWN = "policies.agent1."
_BOTH = (
    "dag.custom_pipeline_fn=ctrl_megatron.pipeline:co_train_pipeline",
    *("actor_rollout_ref.proxy.kind=agent1", f"{_OWN}actor_rollout_ref.rollout.name=hf"),
    *(f"{_OWN}actor_rollout_ref.rollout.n=3", f"{_OWN}data.max_prompt_length=2048"),
    f"{_OWN}actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096",
    f"{_OWN}actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    f"{_OWN}actor_rollout_ref.actor.strategy=fsdp",
)
_CUT = (
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "actor_rollout_ref.actor.megatron.sequence_parallel=true",
)


@pytest.fixture(scope="module")
def solver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It writes a right or a wrong program about as often; its tokens are bytes."""
    folder = tmp_path_factory.mktemp("solver") / "qwen"
    return byte_chat_model(folder, (PROGRAM, "print(6)"), family="qwen3")


@pytest.fixture(scope="module")
def own_job(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return replace(job, folder=tmp_path_factory.mktemp("co_train") / "runs")


def co_train(job: Job, solver: Path, name: str, steps: int, *extra: str) -> ForkedRun:
    settings = (*DRAWN, *_BOTH, f"{_OWN}actor_rollout_ref.model.path={solver}", *extra)
    run = run_forked(job, name, steps=steps, extra=settings, without=(PROXY_MODEL,))
    assert run.codes == (0, 0), run.output[-8000:]
    return run


def test_both_learn(own_job: Job, solver: Path) -> None:
    run = co_train(own_job, solver, "joint", 2, *_CUT, f"data.val_files={own_job.data}")
    *steps, validated = run.metrics()
    assert validated["metrics"]["val/rounds"] == 8
    for step in (record["metrics"] for record in steps):
        for agent in ("", "agent1/"):
            assert step[f"{agent}rollout/probs_diff_max"] < 1e-4
            assert step[f"{agent}actor/grad_norm"] > 0
