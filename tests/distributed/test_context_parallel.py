"""Ranks that share the tokens of rows, against transformers and against one rank, over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from te_stand_ins import SPECS
from test_policy import assert_same_metrics, assert_same_weights, ranks
from test_saved_state import assert_same_contents
from tiny_models import (
    layers_for,
    random_batch,
    reference_gradients,
    reference_log_probs,
    save_tiny,
    widest_gap,
)
from world import run_world

CONTEXT: dict[str, dict[str, Any]] = {
    "cp2": {"context": 2},
    "cp3": {"context": 3},  # does not divide the 4 heads
    "cp4": {"context": 4},  # more than the 2 key heads
    "tp2_cp2": {"tensor": 2, "context": 2},
    "tp2_cp2_sp": {"tensor": 2, "context": 2, "sequence_parallel": True},
    "tp2_cp3_sp": {"tensor": 2, "context": 3, "sequence_parallel": True},
    "cp2_dp2": {"context": 2, "data": 2},
    "cp2_pp2": {"context": 2, "pipeline": 2},
    "cp2_vpp2": {"context": 2, "pipeline": 2, "virtual_pipeline": 2},
}
DENSE = ("llama3_rope", "qwen2", "qwen3")
VARIANTS: dict[str, dict[str, Any]] = {
    "shared": {"token_budget": 64},
    "off": {"token_budget": 21, "shared_prefix": False},
    "recompute": {"token_budget": 64, "build": {"recompute_granularity": "full"}},
    "attention again": {"token_budget": 64, "build": {"recompute_granularity": "selective"}},
    "plain_optimizer": {"optimizer": {"distributed": False}},
}


def check(folder: Path, name: str, families: tuple[str, ...], *, te: bool, steps: Any) -> None:
    """Log-probs, entropies, gradients and exported files of ``families`` are transformers', and the
    first of them takes the ``steps`` of one rank."""
    layout = CONTEXT[name]
    models = {
        family: save_tiny(family, folder / family, num_hidden_layers=layers_for(layout))
        for family in families
    }
    directories = {family: str(path) for family, path in models.items()}
    batch, given = random_batch(seed=3, group=3, holes=True), {"directories": directories}
    train = {
        "directory": directories[families[0]],
        "batch": random_batch(seed=5, rows=8, group=4, holes=True),
        "variants": steps,
    }
    (alone,) = run_world("train", 1, layout={}, out=str(folder / "alone"), **train)
    calls = {
        "parity": given | {"batch": batch, "temperature": 0.7},
        "gradients": given | {"batch": batch},
        "train": train,
    }
    arguments: dict[str, Any] = {"layout": layout, "calls": calls, "out": str(folder / "out")}
    if te:
        found = run_world("with_each_spec", ranks(layout), of="in_turn", **arguments)
    else:
        found = [{"": one} for one in run_world("in_turn", ranks(layout), **arguments)]
    for spec in SPECS if te else ("",):
        out = folder / "out" / spec
        for family, path in models.items():
            theirs = reference_log_probs(path, batch, temperature=0.7)
            for result in found:
                for ours, want in zip(result[spec]["parity"][family], theirs, strict=True):
                    assert torch.allclose(ours, want, atol=1e-5), (family, spec)
            assert_same_weights(path, out / "parity" / family, rel=0)
            gradients = reference_gradients(path, batch, folder / "theirs" / family)
            wanted = load_file(gradients / "model.safetensors")
            for way in ("shared", "apart"):
                ours = load_file(out / "gradients" / way / family / "model.safetensors")
                gap, tensor = widest_gap(ours, wanted)
                assert gap <= 1e-5, (family, spec, way, tensor, gap)
        for variant in steps:
            for result in found:
                assert_same_metrics(alone[variant], result[spec]["train"][variant])
            assert_same_weights(folder / "alone" / variant, out / "train" / variant, rel=1e-5)


def test_two_ranks_share_rows(tmp_path: Path) -> None:
    steps = {"off": VARIANTS["off"]}
    check(tmp_path, "cp2", ("qwen3", "deepseek_v3"), te=True, steps=steps)


@pytest.mark.long
@pytest.mark.parametrize("name", CONTEXT)
def test_every_layout_computes_what_transformers_does_and_takes_the_same_steps(
    tmp_path: Path, name: str
) -> None:
    check(tmp_path, name, DENSE, te=True, steps=VARIANTS)


@pytest.mark.long
def test_checkpoints_go_to_context_ranks_and_back(tmp_path: Path) -> None:
    """What a layout reads it saves again to the last bit, and goes on as the one before."""
    directory = save_tiny("deepseek_v3", tmp_path / "model", num_hidden_layers=2)
    common = {"directory": str(directory), "batch": random_batch(seed=5, rows=8)}
    layouts: list[dict[str, Any]] = [
        {},
        {"context": 2},
        {"context": 2, "expert": 2},
        {"tensor": 2, "context": 2, "sequence_parallel": True, "expert_tensor": 1},
        {"data": 2},
    ]
    start, first = None, list[dict[str, float]]()
    for number, layout in enumerate(layouts):
        out = tmp_path / str(number)
        metrics, *_ = run_world(
            "saving:go_on", ranks(layout), layout=layout, out=str(out), load=start, **common
        )
        first = first or metrics[2:]
        for found, want in zip(metrics[-2:], first, strict=True):
            assert found == pytest.approx(want, rel=1e-5, abs=1e-9), layout
        assert_same_contents(tmp_path / "0/first", out / "first")
        start = str(out / "first")
