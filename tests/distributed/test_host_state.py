"""Optimizer state that rests on the host takes the same steps, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from te_stand_ins import FusedAdam
from tiny_models import random_batch, save_tiny
from world import run_world

from ctrl_megatron.models import host_state
from ctrl_megatron.models.host_state import HostAdamState

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "not distributed": {"dtype": "bfloat16", "optimizer": {"distributed": False}},
    "fsdp": {"strategy": "fsdp"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "dp2": {"data": 2},
    "tp2": {"tensor": 2, "sequence_parallel": True},
}


def compare(
    tmp_path: Path, layout: str, cases: dict[str, Any], family: str, **options: Any
) -> None:
    sizes = LAYOUTS[layout]
    ranks = sizes.get("data", 1) * sizes.get("tensor", 1)
    found = run_world(
        "visiting:train",
        ranks,
        layout=sizes,
        directory=str(save_tiny(family, tmp_path / family)),
        batch=random_batch(seed=5, rows=8, group=4, holes=True),
        out=str(tmp_path / "out"),
        cases=cases,
        **options,
    )
    for of_rank in found:
        for name, (on_device, on_host) in of_rank.items():
            assert on_device == on_host, name
            metrics, steps = on_host
            assert metrics[2] == metrics[3] and steps == {"adam": 3, "schedule": 3}, name


@pytest.mark.parametrize(
    "layout", [n if n == "dp2" else pytest.param(n, marks=pytest.mark.long) for n in LAYOUTS]
)
def test_steps_and_checkpoints_are_those_of_a_state_on_the_device(
    tmp_path: Path, layout: str
) -> None:
    cases = {k: v for k, v in CASES.items() if k != "fsdp" or layout != "tp2"}
    compare(tmp_path, layout, cases, "qwen2_tied")


def test_experts_and_dense_layers_have_optimizers_of_their_own(tmp_path: Path) -> None:
    compare(tmp_path, "dp2", {"bfloat16": {"dtype": "bfloat16"}}, "qwen3_moe")


def test_transformer_engines_adam_counts_a_step_once(tmp_path: Path) -> None:
    compare(tmp_path, "dp2", {"bfloat16": {"dtype": "bfloat16"}}, "qwen2_tied", te=True)


def test_a_failed_step_leaves_adam_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_state, "PART_BYTES", 1)
    weights = [torch.ones(2), torch.ones(3)]
    adam = FusedAdam([{"params": weights}])

    def make(tensor: torch.Tensor) -> None:
        adam.state[tensor] = {name: torch.zeros_like(tensor) for name in ("exp_avg", "exp_avg_sq")}

    state = HostAdamState(adam, lambda tensor: adam.state[tensor].values(), make)
    assert len(state.parts) == 2
    monkeypatch.setattr(adam, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        state.step(lambda _: None)
    assert adam.param_groups[0]["params"] == weights
