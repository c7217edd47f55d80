"""Runs with several rounds in a step: one round is CTRL's step bit by bit, three are resumed
exactly, and what applies to one round applies to three."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked_run import run_forked
from launched_run import Job
from replayed import replay

pytestmark = pytest.mark.timeout(900)

PIPELINE = "dag.custom_pipeline_fn=ctrl_megatron.pipeline:ctrl_rounds_pipeline"
CLOCKED = ("time/", "perf/", "memory/", "sync/", "checkpoint/", "sandbox/", "engine/", "turn/")
"""What depends on the clock or the machine, and what ``ctrl_pipeline`` does not report."""


def rounds(**options: Any) -> tuple[str, ...]:
    return (PIPELINE, *(f"dag.options.{name}={value}".lower() for name, value in options.items()))


def lasting(folder: Path, *left_out: str) -> dict[int, dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    kept = {
        record["step"]: {
            name: value
            for name, value in record["metrics"].items()
            if not name.startswith((*CLOCKED, *left_out))
        }
        for record in records
    }
    return kept


def test_one_round_without_stops_is_the_step_of_ctrl(job: Job) -> None:
    found = []
    for name, extra in (("rounds_ctrl", ()), ("rounds_one", rounds(turns=1, stop=False))):
        run = run_forked(job, name, steps=2, extra=extra)
        assert run.codes == (0, 0), run.output[-8000:]
        found.append(lasting(run.folder))
    assert found[0] == found[1]
    assert found[0][2]["actor/grad_norm"] > 0


def test_three_rounds_are_resumed_exactly_within_an_epoch(job: Job) -> None:
    three = (*rounds(turns=3, stop=False), "trainer.save_freq=1")
    whole = run_forked(job, "rounds_whole", steps=2, extra=three)
    assert whole.codes == (0, 0), whole.output[-8000:]
    for steps in (1, 2):
        part = run_forked(job, "rounds_parts", steps=steps, extra=three)
        assert part.codes == (0, 0), part.output[-8000:]
    # The cache of verdicts is in memory.
    once, again = (lasting(r.folder, "reward/cached_rate") for r in (whole, part))
    assert once == again and sorted(again) == [1, 2]
    turns = [record["metrics"] for record in whole.metrics()]
    assert all(metrics["turn/2/share"] > 0 and metrics["turn/3/share"] > 0 for metrics in turns)
    # The proxy writes one program, so that no revision of a revision changes anything.
    assert all(metrics["turn/2/undone"] == 0 for metrics in turns if "turn/2/undone" in metrics)
    assert any(metrics["turn/2/pass_rate_before"] > 0 for metrics in turns)


@pytest.mark.long
def test_what_applies_to_one_round_applies_to_three(job: Job, tmp_path: Path) -> None:
    """Dynamic sampling, a judging reward, distillation from the verdict on each turn's program."""
    extra = (
        *rounds(turns=3, stop=False),
        *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=8"),
        *("reward.judge.weight=0.5", "reward.judge.wrong=-1"),
        *("algorithm.distillation.hint=feedback", "algorithm.distillation.coef=0.5"),
        *("algorithm.distillation.teacher=policy", "trainer.dump_steps=[2]"),
    )
    run = run_forked(job, "rounds_sampled", steps=2, extra=extra)
    assert run.codes == (0, 0), run.output[-8000:]
    for record in run.metrics():
        metrics = record["metrics"]
        assert metrics["advantage/zero_std_rate"] == 0
        assert metrics["distillation/row_rate"] > 0
        assert -1.5 <= metrics["reward/judge"] <= 1
    codes, said = replay([str(run.folder / "dumps/global_step_2"), "--judge"], tmp_path / "log")
    assert codes == (0,), said


@pytest.mark.long
def test_chains_drawn_ahead_are_dumped_and_replayed(job: Job, tmp_path: Path) -> None:
    extra = (
        *rounds(turns=3, compare="chain", credit="to_go", discount=0.5),
        *("actor_rollout_ref.rollout.staleness=1", "trainer.dump_steps=[2]"),
        "actor_rollout_ref.rollout.placement=dedicated",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "algorithm.rollout_correction.rollout_is=token",
        *("reward.reward_funcs=[critic,echo_gain]", "trainer.save_freq=1"),
    )
    run = run_forked(job, "rounds_chains", steps=2, extra=extra)
    assert run.codes == (0, 0), run.output[-8000:]
    dump = run.folder / "dumps/global_step_2"
    lines = [json.loads(x) for p in dump.glob("texts_*.jsonl") for x in p.read_text().splitlines()]
    later = [line for line in lines if line["turn"] > 1]
    assert later and all(line["program"] and line["parent"] for line in later)
    codes, said = replay([str(dump), "--judge"], tmp_path / "log")
    assert codes == (0,), said
