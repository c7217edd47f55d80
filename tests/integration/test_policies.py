"""Policies that learn in the same steps, each in its own way: adapters, a value model, a reference
that follows; and a third one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from forked_run import ForkedRun, run_forked
from golden_runs import DRAWN, PAIR, PROXY_MODEL, STARTS
from launched_run import Job
from replayed import replay

pytestmark = pytest.mark.timeout(900)

_OWN = "policies.agent1."
APART = (
    *("actor_rollout_ref.model.lora_rank=4", f"{_OWN}actor_rollout_ref.model.lora_rank=0"),
    *(f"{_OWN}algorithm.adv_estimator=gae", f"{_OWN}critic.optim.lr=1e-3"),
    *(f"{_OWN}actor_rollout_ref.ref.sync_steps=1", "trainer.save_freq=1"),
    *("trainer.dump_steps=[2]", "trainer.max_ckpt_to_keep=-1"),
)


@pytest.fixture(scope="module")
def solver(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return STARTS["pair"](job, tmp_path_factory.mktemp("solver")).proxy


@pytest.fixture(scope="module")
def own_job(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return replace(job, folder=tmp_path_factory.mktemp("policies") / "runs")


def run_policies(
    job: Job, solver: Path, name: str, steps: int, extra: tuple[str, ...]
) -> ForkedRun:
    settings = (*DRAWN, *PAIR, f"{_OWN}actor_rollout_ref.model.path={solver}", *extra)
    run = run_forked(job, name, steps=steps, extra=settings, without=(PROXY_MODEL,))
    assert run.codes == (0, 0), run.output[-8000:]
    return run


def computed(run: ForkedRun) -> list[dict[str, float]]:
    names = ("actor/", "critic/", "advantage/", "reward/", "rollout/")
    return [
        {
            name: value
            for name, value in record["metrics"].items()
            if name.partition("agent1/")[2].startswith(names) or name.startswith(names)
        }
        for record in run.metrics()
    ]


@pytest.mark.long
def test_each_learns_in_its_own_way_is_dumped_and_resumed(
    own_job: Job, solver: Path, tmp_path: Path
) -> None:
    whole = run_policies(own_job, solver, "whole", 2, APART)
    steps = computed(whole)
    for step in steps:
        assert step["actor/grad_norm"] > 0 and step["agent1/actor/grad_norm"] > 0
        assert "agent1/critic/vf_loss" in step and "critic/vf_loss" not in step
        assert (
            step["rollout/probs_diff_max"] < 1e-4 and step["agent1/rollout/probs_diff_max"] < 1e-4
        )
    # The solver's reference is the solver before each step, the critic's its start.
    assert [step["agent1/actor/kl_to_reference"] for step in steps] == [0, 0]
    assert [step["actor/kl_to_reference"] != 0 for step in steps] == [False, True]
    saved = {path.name for path in (whole.folder / "checkpoints/global_step_2").iterdir()}
    assert {"policy", "agent1", "agent1_value", "agent1_reference"} <= saved
    for name, policy in (("global_step_2", "actor"), ("global_step_2_agent1", "agent1")):
        dump = whole.folder / "dumps" / name
        codes, said = replay([str(dump), "--update"], tmp_path / f"{policy}.log", ranks=2)
        assert codes == (0, 0) and "grad_norm" in said, said[-6000:]
    for last in (1, 2):
        parts = run_policies(own_job, solver, "parts", last, APART)
    assert computed(parts) == steps


@pytest.mark.long
def test_a_third_policy(own_job: Job, solver: Path) -> None:
    extra = (
        "dag.custom_pipeline_fn=three_policies:build",
        f"policies.agent2.actor_rollout_ref.model.path={solver}",
        "policies.agent2.actor_rollout_ref.actor.optim.lr=5e-3",
        # Each cut in its own way, and all on the same engine.
        f"{_OWN}actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "policies.agent2.actor_rollout_ref.actor.strategy=fsdp",
    )
    run = run_policies(own_job, solver, "three", 2, extra)
    for record in run.metrics():
        for agent in ("", "agent1/", "agent2/"):
            assert record["metrics"][f"{agent}rollout/probs_diff_max"] < 1e-4
            assert record["metrics"][f"{agent}actor/lr"] > 0
    rates = [run.metrics()[0]["metrics"][f"{a}actor/lr"] for a in ("", "agent1/", "agent2/")]
    assert len(set(rates)) == 3
