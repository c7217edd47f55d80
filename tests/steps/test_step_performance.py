"""The metrics of a step's speed, and the critiques that it shows."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from ctrl_megatron.data.prompt_table import PromptTable
from ctrl_megatron.data.rows import Row
from ctrl_megatron.metrics import Timeline
from ctrl_megatron.steps.critique_report import critique_examples
from ctrl_megatron.steps.performance import step_performance
from ctrl_megatron.steps.sample import Revision, Sample, SampleRewards
from ctrl_megatron.types import Completion


def model(passes: int, updates: int) -> Any:
    """A model that has computed this many operations."""
    return SimpleNamespace(take_flops=lambda: (passes, updates))


def worker(reference: Any, clock: Any, others: int) -> Any:
    return SimpleNamespace(
        timeline=Timeline(clock=clock),
        config=SimpleNamespace(trainer=SimpleNamespace(examples_in_report=2)),
        groups=SimpleNamespace(
            size=4,
            is_first=True,
            # The other rank has no engine pool to speak of either.
            gather_data_ranks=lambda mine: [mine, others] if mine else [mine, []],
            all_gather=lambda mine: [mine, {"sandbox/restarts": 1}],
        ),
        actor=model(100, 6000),
        reference=reference,
        value=None,
        reward_model=None,
        engine=None,
        proxy=None,
        counted={},
        restarts=lambda: {"sandbox/restarts": 1, "engine/restarts": 0},
        run_on_leader=lambda work, what, stoppable: asyncio.run(work()),
        step=1,
        peak_flops=1e3,
        elsewhere=(),
    )


def test_speed_counts_every_rank_and_every_pass() -> None:
    now = [0.0]
    stage = worker(model(200, 0), lambda: now[0], 3)
    stage.timeline.begin_step()
    for name, seconds in (("generate_critiques", 5), ("old_log_prob", 1), ("ref_log_prob", 2)):
        with stage.timeline.phase(name):
            now[0] += seconds
    with stage.timeline.phase("actor_update"), stage.timeline.phase("sandbox", kind="host"):
        now[0] += 4
    masks = {
        "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
        "response_mask": torch.tensor([[True, True], [True, False]]),
    }
    batch = TensorDict(masks, batch_size=[2])
    # Nodes of a second policy take time, and its model computes.
    alone = SimpleNamespace(gather_data_ranks=lambda mine: [mine])
    second = SimpleNamespace(actor=model(10, 90), reference=None, value=None, groups=alone)
    stage.agents = [stage, second]
    with stage.timeline.phase("agent1_actor_update"):
        now[0] += 8
    found = step_performance(stage, batch)
    assert found["perf/tokens_per_second"] == pytest.approx((3 + 2 + 3) / 20)
    # The sum of the policies' passes and updates and the reference's passes, in 15 seconds.
    assert "perf/engine_balance" not in found
    assert found["sandbox/restarts"] == 2 and "engine/restarts" not in found
    assert found["perf/mfu"] == pytest.approx((100 + 6000 + 200 + 10 + 90 + 3) / (15 * 4 * 1e3))


def critique(
    row: str, text: str, judgment: bool | None, revision: Revision | None = None, detail: str = ""
) -> Sample:
    drawn = Completion(token_ids=(1,), log_probs=(0.0,), finish_reason="stop", spans=())
    outcome = SampleRewards(total=0.0, rewards={}, detail=detail)
    return Sample(
        row_id=row,
        completion=drawn,
        text=text,
        judgment=judgment,
        revision=revision,
        outcome=outcome,
    )


def test_examples_prefer_valid_critiques_and_show_one_per_group() -> None:
    stage = worker(None, lambda: 0.0, 0)
    rows = [Row(id=i, problem=f"P{i}", solution="s", pass_rate=0.5) for i in "xyz"]
    stage.train = PromptTable(rows=tuple(rows), prompts=(), dropped=0)
    named = {
        "problem_id": ["x", "x", "y", "z"],
        "uid": ["gx", "gx", "gy", "gz"],
        "version": ["actor@4"] * 4,
        "sample": [
            critique("x", "c0", None),
            critique("x", "c1", False, Revision(text="r1", version="proxy:big"), "d1"),
            critique("y", "c2", None),
            critique("z", "c3", True, Revision(text="r3", version="proxy:big")),
        ],
    }
    batch = TensorDict(
        {
            "reward/critic": torch.tensor([0.0, 0.25, 0.0, float("nan")]),
            "pass_rate": torch.tensor([0.0, 0.25, 0.0, 1.0]),
            "copied": torch.tensor([float("nan"), 0.5, float("nan"), 1.0]),
        },
        batch_size=[4],
    )
    for name, values in named.items():
        batch[name] = NonTensorStack(*values)
    first, second, third = critique_examples(stage, batch)
    assert (first["critique"], first["problem"], first["reward"]) == ("c1", "Px", 0.25)
    assert (first["judgment"], first["detail"], first["passed_before"]) == ("valid", "d1", 0.5)
    assert first["versions"] == "critique by actor@4, revision by proxy:big"
    assert (second["critique"], second["revision"], second["passed_after"]) == ("c3", "r3", 1.0)
    assert second["reward"] is None, "a row that could not be judged"
    assert [e["copied"] for e in (first, second, third)] == [0.5, 1.0, None]
    assert (third["judgment"], third["versions"]) == ("none", "critique by actor@4")
