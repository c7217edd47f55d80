"""Recorded and replayed values: what counts as a difference, and how it is reported."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctrl_megatron.config import load_config
from ctrl_megatron.errors import UserError
from ctrl_megatron.run.replay import find_start_weights
from ctrl_megatron.run.replay_comparison import (
    FieldGap,
    MetricPair,
    StepComparison,
    largest_gaps,
    metric_pairs,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("recorded", "replayed", "agrees"),
    [
        *((1.0, 1.0, True), (1.0, 1.0 + 2e-6, False), (100.0, 100.00005, True)),
        *((0.0, 5e-7, True), (None, 1.0, False), (1.0, None, False)),
        *((NAN, NAN, True), (NAN, 1.0, False), (1.0, INF, False), (INF, INF, True)),
    ],
)
def test_a_metric(recorded: float | None, replayed: float | None, agrees: bool) -> None:
    pair = MetricPair(name="loss", recorded=recorded, replayed=replayed)
    assert pair.agrees(1e-6) is agrees


def test_the_replays_metrics_are_compared() -> None:
    pairs = metric_pairs({"b": 1.0, "pushed": 2.0}, {"b": 1.5, "a": 0.0})
    assert [(p.name, p.recorded, p.replayed) for p in pairs] == [("a", None, 0.0), ("b", 1.0, 1.5)]


def test_the_gap_of_a_row_is_its_largest_where_the_mask_is_on() -> None:
    recorded = torch.tensor([[1.0, 2.0, 9.0], [NAN, 1.0, 1.0], [NAN, 0.0, 50.0], [1.0, 1.0, 1.0]])
    replayed = torch.tensor([[1.0, 2.5, 0.0], [NAN, 1.0, 1.0], [0.0, 0.0, 75.0], [NAN, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1], [1, 1, 1]]).bool()
    assert largest_gaps(recorded, replayed, mask) == pytest.approx([0.2, 0.0, 1 / 3, INF])
    whole = torch.tensor([True, False]), torch.tensor([True, True])
    assert largest_gaps(*whole, mask[:2]) == [0.0, 1.0]


def test_what_is_printed_names_the_samples() -> None:
    gaps = {0: 0.0, 3: 0.5, 1: 2.0, **dict.fromkeys(range(10, 15), 0.25)}
    comparison = StepComparison(
        metrics=(MetricPair(name="actor/loss", recorded=1.0, replayed=1.5),),
        fields=(FieldGap(name="advantages", gaps=gaps),),
    )
    lines = comparison.report_lines(1e-3, [f"sample {n}" for n in range(20)])
    assert lines[1].split() == ["actor/loss", "1", "1.5", "differs"]
    assert lines[2] == "advantages: 7 of 8 samples differ; largest difference 2"
    assert lines[3:5] == ["  sample 1: 2", "  sample 3: 0.5"]
    assert lines[8] == "  and 2 more"
    assert lines[9] == "recorded and replayed values do not all agree within 0.001"
    assert comparison.agrees(2.0) and not comparison.agrees(1.0)
    assert comparison.to_json()["fields"] == [
        {"name": "advantages", "gaps": [0.0, 2.0, 0.5, *[0.25] * 5]}
    ]


def test_a_base_without_its_adapters_is_no_start(tmp_path: Path) -> None:
    config = load_config(None, ["actor_rollout_ref.model.lora_rank=8"], "none")
    dump: Any = SimpleNamespace(step=3)
    with pytest.raises(UserError, match=r"adapters need their base.*global_step_2"):
        find_start_weights(dump, config, tmp_path)
