"""PPO with the value model or the reference on ranks of their own computes what it does with the
actor's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import golden_runs
import pytest
from forked_run import ForkedRun, run_forked
from launched_run import Job
from tiny_run import REPOSITORY

from ctrl_megatron.config import Config, load_config
from ctrl_megatron.errors import UserError
from ctrl_megatron.memory.proposal import GENERATION, choose_placement, placement_candidates
from ctrl_megatron.memory.shapes import ModelShapes, model_shapes
from ctrl_megatron.metrics import read_json_lines

pytestmark = pytest.mark.timeout(900)

_A, _C = "actor_rollout_ref.actor.megatron.", "critic.megatron."
_F = "actor_rollout_ref.ref.megatron."
PLACES: dict[str, tuple[int, tuple[str, ...]]] = {
    "together": (2, ()),
    "2+1": (3, ("placement.critic=[2]",)),
    "2+2, value model cut": (
        4,
        ("placement.critic=[2,3]", _C + "tensor_model_parallel_size=2"),
    ),
    "2+2, actor cut": (
        4,
        ("placement.critic=[2,3]", _A + "tensor_model_parallel_size=2"),
    ),
    "1+2, value model in stages": (
        3,
        ("placement.critic=[1,2]", _C + "pipeline_model_parallel_size=2"),
    ),
    "2+1, reference": (3, ("placement.reference=[2]",)),
    "2+1+1": (4, ("placement.critic={share: 0.25}", "placement.reference=[2]")),
    "2+2, both cut": (
        4,
        (
            *("placement.critic=[2,3]", _C + "tensor_model_parallel_size=2"),
            *("placement.reference=[2,3]", _F + "tensor_model_parallel_size=2"),
        ),
    ),
}
"""Ranks and settings; the actor's two ranks are data ranks unless it is cut."""
FSDP = {
    "together, fsdp": (2, ()),
    "2+2+1, fsdp": (5, ("placement.critic=[2,3]", "placement.reference=[4]")),
}
PLACES |= {
    name: (ranks, (*settings, "actor_rollout_ref.actor.strategy=fsdp"))
    for name, (ranks, settings) in FSDP.items()
}
EQUAL = {"rel": 1e-5, "abs": 2e-7}
"""float32 sums in another order; advantages are normalised, so the mean loss is about 0."""
TEXTS = ("critique", "revision", "reward")
LOSSES = ("actor/loss", "actor/pg_loss", "critic/loss", "critic/vf_loss", "reward/mean")
LOSSES += ("critic/value_mean", "actor/grad_norm", "critic/grad_norm")
Runs = Callable[[str], ForkedRun]


def run_ppo(job: Job, name: str, place: str, steps: int, *extra: str) -> ForkedRun:
    ranks, settings = PLACES[place]
    settings = (*golden_runs.DRAWN, *golden_runs.RL["ppo"], *settings, *extra)
    settings += (f"trainer.n_gpus_per_node={ranks}",)
    run = run_forked(job, name, steps=steps, extra=settings, ranks=ranks)
    assert run.codes == (0,) * ranks, run.output[-8000:]
    return run


@pytest.fixture(scope="module")
def apart_job(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return replace(job, folder=tmp_path_factory.mktemp("apart") / "runs")


@pytest.fixture(scope="module")
def runs(apart_job: Job) -> Runs:
    """The run of four steps in that placement, which runs once."""
    return cache(lambda place: run_ppo(apart_job, place.replace(" ", "_"), place, 4))


def assert_same(found: ForkedRun, expected: list[dict[str, Any]]) -> None:
    steps = golden_runs.steps_of(found)
    assert len(steps) == len(expected)
    for number, (step, wanted) in enumerate(zip(steps, expected, strict=True), 1):
        # The texts of the first data rank, which has all rows if it is the only one.
        shown = ([{k: t[k] for k in TEXTS} for t in one["texts"]] for one in (step, wanted))
        fewer, more = sorted(shown, key=len)
        assert fewer and all(text in more for text in fewer), number
        of = {name: value for name, value in wanted["metrics"].items() if name in LOSSES}
        known = {name: step["metrics"].get(name) for name in of}
        assert known == pytest.approx(of, **EQUAL), number
        assert step["metrics"].keys() == wanted["metrics"].keys()


def overlaps(run: ForkedRun, one: str, other: str) -> list[float]:
    """Seconds of each step in which phases of both names ran, on whatever ranks."""
    spans: dict[int, dict[str, tuple[float, float]]] = {}
    for record in read_json_lines(run.folder / "timeline.jsonl"):
        for phase in record["phases"]:
            spans.setdefault(record["step"], {})[phase["name"]] = phase["start"], phase["end"]
    both = [(of[one], of[other]) for of in spans.values() if one in of and other in of]
    return [min(a[1], b[1]) - max(a[0], b[0]) for a, b in both]


def test_models_apart_learn_the_same(apart_job: Job) -> None:
    """Two steps against the recorded run of two ranks that share all models."""
    run = run_ppo(apart_job, "first", "2+1+1", 2)
    recorded = golden_runs.load("ppo")
    if recorded["machine"] == golden_runs.machine():
        assert_same(run, recorded["steps"][:2])
    ranks = {record["rank"] for record in read_json_lines(run.folder / "timeline.jsonl")}
    assert ranks == {0, 2, 3}


@pytest.mark.long
@pytest.mark.parametrize("place", [name for name in PLACES if not name.startswith("together")])
def test_every_placement_learns_the_same_and_updates_overlap(runs: Runs, place: str) -> None:
    together, apart = runs("together, fsdp" if place in FSDP else "together"), runs(place)
    assert_same(apart, golden_runs.steps_of(together))
    settings = " ".join(PLACES[place][1])
    for role, one, other in (
        ("critic", "critic_update", "actor_update"),
        ("reference", "ref_log_prob", "old_log_prob"),
    ):
        if f"placement.{role}" in settings:
            # On few cores a phase of one rank may wait for its turn; most steps overlap.
            found = overlaps(apart, one, other)
            assert len(found) == 4 and sum(seconds > 0 for seconds in found) >= 3, found
        assert max(overlaps(together, one, other)) <= 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [("2+1", "2+1"), ("together", "2+1+1"), ("2+2, actor cut", "together"), ("2+1+1", "2+1")],
)
def test_a_run_goes_on_in_another_placement(
    apart_job: Job, runs: Runs, before: str, after: str
) -> None:
    name = f"{before}_then_{after}".replace(" ", "_")
    run_ppo(apart_job, name, before, 2)
    assert_same(run_ppo(apart_job, name, after, 4), golden_runs.steps_of(runs("together")))


@pytest.mark.long
def test_a_run_places_its_roles_itself(apart_job: Job, runs: Runs) -> None:
    """``placement=auto`` where one world does not fit."""
    settings = (*golden_runs.DRAWN, *golden_runs.RL["ppo"], "trainer.n_gpus_per_node=4")
    settings += ("placement=auto",)
    file = REPOSITORY / "examples/ctrl_smollm2_cpu.yaml"
    config = load_config(file, [*apart_job.overrides("auto", 2), *settings], "rl")
    shapes = model_shapes(config, "rl")
    least = 1 << 20
    while not (tight := _proposed(config, shapes, least)):
        least += least >> 4
    settings += (f"placement.gpu_memory={least / 2**30}",)
    assert tight[0].startswith("placement.critic=")
    with apart_job.launch("auto", steps=2, extra=settings, ranks=4) as run:
        run.ends(280.0)
    assert f"proposal: '{tight[0]}'" in run.output(), run.output()[:3000]
    wanted = golden_runs.steps_of(runs("together"))[:2]
    assert len(run.metrics()) == 2
    for line, step in zip(run.metrics(), wanted, strict=True):
        of = {name: value for name, value in step["metrics"].items() if name in LOSSES}
        assert {name: line["metrics"].get(name) for name in of} == pytest.approx(of, **EQUAL)


def _proposed(config: Config, shapes: ModelShapes, gpu_memory: int) -> list[str]:
    """The keys of the proposal; nothing where no placement fits."""
    try:
        found = placement_candidates(
            config, shapes, gpu_memory=gpu_memory, generation=GENERATION, kernels="torch"
        )
        return choose_placement(found).overrides
    except UserError:
        return []


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 2])
def test_a_stop_on_any_world_is_everybodys_and_a_killed_rank_ends_all(
    apart_job: Job, rank: int
) -> None:
    settings = (*golden_runs.RL["ppo"], "placement.critic=[2]", "trainer.n_gpus_per_node=3")
    with apart_job.launch(f"stopped_{rank}", steps=50, extra=settings, ranks=3) as run:
        run.wait_for_steps(1)
        os.kill(run.rank(rank).pid, signal.SIGTERM)
        run.ends(60.0)
        assert "the state after step" in run.output(), run.output()[-8000:]
    done = len(run.metrics())
    assert (run.folder / f"checkpoints/global_step_{done}/value").is_dir()
    with apart_job.launch(f"stopped_{rank}", steps=50, extra=settings, ranks=3) as again:
        again.wait_for_steps(done + 1)
        assert f"after step {done}" in again.output()
        os.kill(again.rank(rank).pid, signal.SIGKILL)
        killed = time.monotonic()
        again.ends(30.0)
        while again.look() and time.monotonic() < killed + 30.0:
            time.sleep(0.1)
        assert again.look() == [], again.output()[-8000:]
        assert f"rank {rank}" in again.output()
