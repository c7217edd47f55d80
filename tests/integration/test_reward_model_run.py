"""Runs with a reward model, whose tokenizer is not the actor's: beside it, and on other ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import golden_runs
import pytest
import torch
from forked_run import ForkedRun, run_forked
from launched_run import Job
from tiny_reward_models import save_reward_model, transformers_rewards

from ctrl_megatron.data.rows import read_rows
from ctrl_megatron.metrics import read_json_lines

pytestmark = pytest.mark.timeout(900)

PIPELINE = "dag.custom_pipeline_fn=ctrl_megatron.pipeline:"
NOBODY_REVISES = (
    *("actor_rollout_ref.proxy.model.path", "actor_rollout_ref.rollout.revision_max_tokens"),
    "sandbox.workers",
)
BREVITY = "reward.reward_funcs=[foreign_pipeline:brevity]"
_R = "reward_model.megatron."
FSDP = "actor_rollout_ref.actor.strategy=fsdp"
PLACES: dict[str, tuple[int, tuple[str, ...]]] = {
    "together": (2, ()),
    "2+1": (3, ("placement.reward_model=[2]",)),
    "2+2, cut": (4, ("placement.reward_model=[2,3]", _R + "tensor_model_parallel_size=2")),
    "2+1, with the reference": (3, ("placement.reward_model=[2]", "placement.reference=[2]")),
    "1+1+1": (3, ("placement.reward_model=[1]", "placement.reference=[2]")),
    "together, fsdp": (2, (FSDP,)),
    "2+2, fsdp": (4, ("placement.reward_model=[2,3]", FSDP)),
}
LOSSES = ("actor/loss", "actor/pg_loss", "actor/grad_norm", "reward/mean", "reward/reward_model")
LOSSES += ("reward/total", "reward/masked_rate", "reward_model/length")
EQUAL: dict[str, Any] = {"rel": 1e-5, "abs": 2e-7}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward_model") / "model")


def run(job: Job, name: str, model: Path, *extra: str, ranks: int = 2, **more: Any) -> ForkedRun:
    on = ("reward_model.enable=true", f"reward_model.model.path={model}")
    settings = (*golden_runs.DRAWN, *on, *extra, f"trainer.n_gpus_per_node={ranks}")
    found = run_forked(job, name, extra=settings, ranks=ranks, **more)
    assert found.codes == (0,) * ranks, found.output[-8000:]
    return found


def test_rewards_of_a_run_are_those_of_transformers(job: Job, model: Path) -> None:
    """Alone, in GRPO: of every text that the run shows."""
    settings = (PIPELINE + "grpo_pipeline", "reward.reward_funcs=[]")
    found = run(job, "rewarded", model, *settings, steps=1, without=NOBODY_REVISES)
    shown = read_json_lines(found.folder / "examples.jsonl")
    prompts = {row.id: row.prompt for row in read_rows([str(job.data)])}
    answered = [
        [*prompts[one["id"]], {"role": "assistant", "content": one["completion"]}] for one in shown
    ]
    expected = transformers_rewards(model, answered).tolist()
    assert [one["reward_model"] for one in shown] == pytest.approx(expected, abs=1e-5)
    (metrics,) = (record["metrics"] for record in found.metrics())
    assert metrics["reward/masked_rate"] == 0 and metrics["actor/grad_norm"] > 0
    assert metrics["reward_model/length"] > 20 and math.isfinite(metrics["reward/mean"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "extra", "without"),
    [
        ("ctrl", ("reward_model.weight=0.5",), ()),
        ("ppo", (BREVITY, "algorithm.adv_estimator=gae"), NOBODY_REVISES),
        (
            "dapo",
            (
                *(BREVITY, "algorithm.filter_groups.enable=true", "data.gen_batch_size=6"),
                *("actor_rollout_ref.rollout.n=4", "reward_model.weight=0.5"),
                "actor_rollout_ref.actor.megatron.param_offload=true",
            ),
            NOBODY_REVISES,
        ),
    ],
)
def test_every_pipeline_adds_it_to_the_other_rewards(
    job: Job, model: Path, name: str, extra: tuple[str, ...], without: tuple[str, ...]
) -> None:
    pipeline = f"{PIPELINE}{name}_pipeline"
    found = run(job, f"rewarded_{name}", model, pipeline, *extra, steps=2, without=without)
    weight = 0.5 if "reward_model.weight=0.5" in extra else 1.0
    for record in found.metrics():
        metrics = record["metrics"]
        total = metrics["reward/mean"] + weight * metrics["reward/reward_model"]
        assert metrics["reward/total"] == pytest.approx(total, rel=1e-5)
        assert metrics["actor/grad_norm"] > 0


@pytest.fixture(scope="module")
def runs(job: Job, model: Path) -> Callable[[str], ForkedRun]:
    """The run of three steps in that placement, which runs once."""

    def make(place: str) -> ForkedRun:
        ranks, settings = PLACES[place]
        common = (PIPELINE + "grpo_pipeline", BREVITY, "reward_model.weight=0.5", *settings)
        name = f"placed_{place}".replace(" ", "_")
        return run(job, name, model, *common, steps=3, ranks=ranks, without=NOBODY_REVISES)

    return cache(make)


@pytest.mark.long
@pytest.mark.parametrize("place", [name for name in PLACES if not name.startswith("together")])
def test_on_ranks_of_its_own_it_rewards_the_same(
    runs: Callable[[str], ForkedRun], place: str
) -> None:
    together, apart = (
        [record["metrics"] for record in runs(where).metrics()]
        for where in ("together, fsdp" if FSDP in PLACES[place][1] else "together", place)
    )
    assert len(together) == len(apart) == 3
    for number, (wanted, found) in enumerate(zip(together, apart, strict=True), 1):
        known = {name: wanted[name] for name in LOSSES}
        assert {name: found[name] for name in LOSSES} == pytest.approx(known, **EQUAL), number
        assert torch.tensor(list(known.values())).isfinite().all()


@pytest.mark.long
def test_a_run_whose_texts_are_all_too_long_ends_with_the_reason(job: Job, model: Path) -> None:
    settings = (PIPELINE + "grpo_pipeline", BREVITY, "reward_model.max_length=20")
    on = ("reward_model.enable=true", f"reward_model.model.path={model}", *settings)
    found = run_forked(job, "too_long", steps=1, extra=on, without=NOBODY_REVISES)
    assert set(found.codes) == {2}, found.output[-8000:]
    assert "reward_model.max_length" in found.output
