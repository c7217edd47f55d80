"""Models with experts against transformers and against themselves on other layouts, in real gloo
processes.

transformers keeps the experts of a layer in one tensor, so files are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from te_stand_ins import SPECS
from test_saved_state import assert_same_contents
from tiny_models import (
    EXPERTS,
    gradient_bound,
    random_batch,
    reference_biases,
    reference_gradients,
    reference_log_probs,
    reference_router_losses,
    save_tiny,
    weights_of,
)
from world import run_world

from ctrl_megatron.parallel.layout import Layout

TENSOR: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"data": 2},
    "tp2": TENSOR,
    "tp2_etp1": TENSOR | {"expert_tensor": 1},
    "tp2_ep2_etp1": TENSOR | {"expert": 2, "expert_tensor": 1},
    "pp2": {"pipeline": 2},
    "vpp2_ep2": {"pipeline": 2, "virtual_pipeline": 2, "data": 2, "expert": 2},
    "ep2": {"data": 2, "expert": 2},
    "etp2": {"data": 2, "expert_tensor": 2},
    "dp4_ep2": {"data": 4, "expert": 2},
    "tp2_ep2": TENSOR | {"data": 2, "expert": 2},
    "tp2_ep4_etp1": TENSOR | {"data": 2, "expert": 4, "expert_tensor": 1},
    "cp2_ep2": {"context": 2, "expert": 2},
    "tp2_cp2": TENSOR | {"context": 2},
    "cp2_ep4": {"context": 2, "data": 2, "expert": 4},
    "cp3": {"context": 3},
}

QUICK = "tp2_ep2_etp1"
LONG = ("ep2", "tp2_cp2", "cp2_ep4", "cp3")

LOADS = {"moe/max_load", *(f"moe/max_load/{layer}" for layer in range(4))}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(name, root / name) for name in EXPERTS}


def biases_of(directory: Path) -> dict[str, torch.Tensor]:
    """The biases that DeepSeek-V3's routers add to their choice."""
    weights = weights_of(directory)
    return {name: w for name, w in weights.items() if name.endswith("e_score_correction_bias")}


def assert_close(found: Path, expected: dict[str, torch.Tensor], rel: float) -> None:
    weights = weights_of(found)
    assert expected.keys() == weights.keys()
    # Gradients that cancel are rounding: of keys' biases where nothing is rotated, all do.
    floor = 1e-7 * float(torch.stack([want.norm() for want in expected.values()]).norm())
    for name, want in expected.items():
        gap = float((weights[name] - want).norm())
        assert gap <= rel * float(want.norm()) + floor, (found, name, gap)


def in_world(layout: dict[str, Any], out: Path, **calls: dict[str, Any]) -> list[dict[str, Any]]:
    """By rank the results of the workers' functions."""
    size = Layout(**layout).world_size
    return run_world("in_turn", size, layout=layout, out=str(out), calls=calls)


@pytest.fixture(scope="module")
def passes(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """The calls whose results ``check_passes`` compares with transformers'."""
    directories = {family: str(path) for family, path in models.items()}
    parity = {"batch": random_batch(seed=3, group=3), "temperature": 0.7}
    return {
        "parity": {"directories": directories, **parity},
        "gradients": {"directories": directories, "batch": random_batch(seed=4, group=3)},
    }


@pytest.fixture(scope="module")
def theirs(
    models: dict[str, Path],
    passes: dict[str, dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Per family transformers' log-probs, entropies and gradients."""
    out, found = tmp_path_factory.mktemp("theirs"), {}
    for family, path in models.items():
        gradients = reference_gradients(path, passes["gradients"]["batch"], out / family)
        log_probs = reference_log_probs(path, passes["parity"]["batch"], temperature=0.7)
        found[family] = (*log_probs, weights_of(gradients))
    return found


def check_passes(
    models: dict[str, Path], theirs: dict[str, Any], out: Path, found: list[dict[str, Any]]
) -> None:
    """Log-probs and gradients, with shared prompts and without, are transformers', and a model is
    exported as it was imported."""
    for family, path in models.items():
        expected, entropy, gradients = theirs[family]
        for results in found:
            assert torch.allclose(results["parity"][family][0], expected, atol=1e-5), family
            assert torch.allclose(results["parity"][family][1], entropy, atol=1e-5), family
        before, after = weights_of(path), weights_of(out / "parity" / family)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        for way in ("shared", "apart"):
            assert_close(out / "gradients" / way / family, gradients, gradient_bound(family, 4))


@pytest.fixture(scope="module")
def steps(models: dict[str, Path]) -> dict[str, Any]:
    """The arguments of three steps; data ranks have different numbers of micro-batches."""
    return {
        "directory": str(models["qwen3_moe"]),
        "batch": random_batch(seed=5, rows=9, group=3),
        "variants": {
            "shared": {"token_budget": 64},
            "many": {"token_budget": 21, "shared_prefix": False},
            "recompute": {
                "token_budget": 64,
                "shared_prefix": False,
                "build": {"recompute_granularity": "full"},
            },
            "grouped": {
                "token_budget": 21,
                "shared_prefix": False,
                "build": {"overrides": {"moe_grouped_gemm": True}},
            },
            "plain_optimizer": {
                "token_budget": 64,
                "shared_prefix": False,
                "optimizer": {"distributed": False},
            },
        },
    }


@pytest.fixture(scope="module")
def alone(
    models: dict[str, Path],
    theirs: dict[str, Any],
    passes: dict[str, dict[str, Any]],
    steps: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """(weights, metrics) after three steps of one process, whose passes are checked."""
    out = tmp_path_factory.mktemp("alone")
    found = in_world({}, out, **passes, train=steps)
    check_passes(models, theirs, out, found)
    return weights_of(out / "train/many"), found[0]["train"]["many"]


@pytest.mark.parametrize(
    "name",
    [n if n == QUICK else pytest.param(n, marks=pytest.mark.long) for n in LAYOUTS],
)
def test_every_layout_computes_what_transformers_does_and_takes_the_same_steps(
    models: dict[str, Path],
    theirs: dict[str, Any],
    passes: dict[str, dict[str, Any]],
    steps: dict[str, Any],
    alone: tuple[dict[str, torch.Tensor], list[dict[str, float]]],
    tmp_path: Path,
    name: str,
) -> None:
    found = in_world(LAYOUTS[name], tmp_path, **passes, train=steps)
    check_passes(models, theirs, tmp_path, found)
    weights, metrics = alone
    for results in found:
        for variant, taken in results["train"].items():
            for step, want in zip(taken, metrics, strict=True):
                assert step.keys() == want.keys() >= {"moe/max_load", "moe/max_load/3"}
                # How often a shared prompt is computed depends on the ranks of its rows.
                for name in step if variant != "shared" else step.keys() - LOADS:
                    assert step[name] == pytest.approx(want[name], rel=1e-5, abs=1e-9), variant
            assert_close(tmp_path / "train" / variant, weights, 1e-5)


def test_the_host_waits_for_numbers_of_tokens_only_where_ranks_exchange_them(
    models: dict[str, Path],
) -> None:
    given = {"directory": str(models["qwen3_moe"]), "batch": random_batch(seed=3, rows=2)}
    (alone,) = run_world("waits_for_counts", 1, layout={}, **given)
    assert alone == 0
    assert all(run_world("waits_for_counts", 2, layout=LAYOUTS["ep2"], **given))


@pytest.mark.long
@pytest.mark.parametrize("name", ["ep2", "tp2_ep2_etp1"])
def test_transformer_engines_layers_compute_the_same(
    models: dict[str, Path],
    theirs: dict[str, Any],
    passes: dict[str, dict[str, Any]],
    tmp_path: Path,
    name: str,
) -> None:
    layout = LAYOUTS[name]
    found = run_world(
        "with_each_spec",
        Layout(**layout).world_size,
        of="in_turn",
        layout=layout,
        calls=passes,
        out=str(tmp_path),
    )
    for spec in SPECS:
        check_passes(models, theirs, tmp_path / spec, [results[spec] for results in found])


def test_checkpoints_go_from_layout_to_layout(models: dict[str, Path], tmp_path: Path) -> None:
    """What a layout reads it saves again to the last bit, and goes on as the one before, also with
    the biases of the routers, which change in every step."""
    common: dict[str, Any] = {
        "directory": str(models["deepseek_v3"]),
        "batch": random_batch(seed=5, rows=8),
        "router": {"bias_rate": 0.03},
    }
    start, first, biases = None, list[dict[str, float]](), biases_of(models["deepseek_v3"])
    steps: dict[str, torch.Tensor] = {}
    for name in ("dp2", "ep2", "tp2_ep2"):
        layout, out = LAYOUTS[name], tmp_path / name
        size = Layout(**layout).world_size
        metrics, *_ = run_world(
            "saving:go_on", size, layout=layout, out=str(out), load=start, **common
        )
        first = first or metrics[2:]
        for found, want in zip(metrics[-2:], first, strict=True):
            assert found == pytest.approx(want, rel=1e-5, abs=1e-9), name
        assert_same_contents(tmp_path / "dp2/first", out / "first")
        start = str(out / "first")
        changed = {name: bias - biases[name] for name, bias in biases_of(out / "hf").items()}
        steps = steps or changed
        assert all(step.abs().max() > 0.1 for step in steps.values())
        assert all(torch.equal(step, changed[name]) for name, step in steps.items())


@pytest.mark.parametrize(
    "name", [QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
def test_biases_of_the_routers_follow_the_tokens_of_all_ranks(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    batch, rate = random_batch(seed=6, rows=7), 0.01
    arguments = {"directory": str(models["deepseek_v3"]), "batch": batch}
    in_world(LAYOUTS[name], tmp_path, router_gradients=arguments | {"options": {"bias_rate": rate}})
    found = biases_of(tmp_path / "router_gradients")
    expected = reference_biases(models["deepseek_v3"], batch, rate)
    assert len(expected) == 3 and found.keys() == expected.keys()
    for bias, want in expected.items():
        assert torch.allclose(found[bias], want, atol=1e-6, rtol=0), bias


@pytest.mark.long
@pytest.mark.parametrize("name", ["ep2", "tp2_ep2_etp1"])
def test_a_loaded_model_equals_the_saved_one_to_the_last_bit(tmp_path: Path, name: str) -> None:
    directory = str(save_tiny("qwen3_moe_mixed", tmp_path / "model", num_hidden_layers=2))
    cases: dict[str, dict[str, Any]] = {
        "bfloat16": {"directory": directory, "dtype": "bfloat16"},
        "plain_optimizer": {"directory": directory, "optimizer": {"distributed": False}},
    }
    layout = LAYOUTS[name]
    run_world(
        "saving:save_and_go_on",
        Layout(**layout).world_size,
        layout=layout,
        cases=cases,
        batch=random_batch(seed=5, rows=7),
        out=str(tmp_path),
    )
    for case in cases:
        for spec, again in (("local", "read_by_te"), ("te", "read_by_local")):
            assert_same_contents(tmp_path / spec / case, tmp_path / again / case)


@pytest.mark.parametrize(
    "name", [QUICK, "cp2_ep2", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
def test_losses_of_the_routers_are_means_over_all_tokens(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    layout, batch = LAYOUTS[name], random_batch(seed=6, rows=7)
    losses, data = {"balance": 0.3, "z": 0.05}, LAYOUTS[name].get("data", 1)
    parts = [{key: rows[rank::data] for key, rows in batch.items()} for rank in range(data)]
    family = "qwen3_moe_mixed"
    theirs, metrics = reference_router_losses(models[family], parts, losses, tmp_path / "theirs")
    arguments = {"directory": str(models[family]), "batch": batch, "options": losses}
    for found in in_world(layout, tmp_path, router_gradients=arguments):
        step = found["router_gradients"]
        assert {key: step[key] for key in metrics} == pytest.approx(metrics, rel=1e-5)
    assert_close(tmp_path / "router_gradients", weights_of(theirs), 1e-5)
