"""The Policy against transformers and against itself on other layouts, in real gloo processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from te_stand_ins import SPECS
from tiny_models import (
    FAMILIES,
    VOCAB,
    gradient_bound,
    layers_for,
    random_batch,
    reference_gradients,
    reference_log_probs,
    save_tiny,
    widest_gap,
)
from world import run_world

from ctrl_megatron.parallel.layout import Layout

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "dp2": {"data": 2},
    "tp2": {"tensor": 2},
    "tp2_sp": {"tensor": 2, "sequence_parallel": True},
    "pp2": {"pipeline": 2},
    "pp3": {"pipeline": 3},
    "vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "vpp2_dp2": {"pipeline": 2, "virtual_pipeline": 2, "data": 2},
    "tp2_pp2_sp": {"tensor": 2, "pipeline": 2, "sequence_parallel": True},
    "tp2_pp2_dp2": {"tensor": 2, "pipeline": 2, "data": 2},
    "cp2": {"context": 2},
    "tp2_cp2_sp": {"tensor": 2, "context": 2, "sequence_parallel": True},
}


def ranks(layout: dict[str, Any]) -> int:
    return Layout(**layout).world_size


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_tiny(family, root / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directory of the model for layouts without pipeline stages (``layers_for``)."""
    root = tmp_path_factory.mktemp("shallow")
    return {family: save_tiny(family, root / family, num_hidden_layers=2) for family in FAMILIES}


def assert_same_weights(left: Path, right: Path, rel: float) -> None:
    before, after = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if rel == 0:
            assert torch.equal(tensor, after[name]), name
        else:
            gap = (tensor - after[name]).norm() / tensor.norm()
            assert gap <= rel, (name, float(gap))


@pytest.mark.parametrize(
    "name",
    [
        *("tp1", "vpp2", "tp2_pp2_sp"),
        *(pytest.param(n, marks=pytest.mark.long) for n in ("tp2", "tp2_sp", "pp3")),
    ],
)
def test_families_equal_transformers_and_survive_a_round_trip(
    models: dict[str, Path], shallow: dict[str, Path], tmp_path: Path, name: str
) -> None:
    layout, batch = LAYOUTS[name], random_batch(seed=3, group=3, holes=True)
    models = models if layers_for(layout) == 4 else shallow
    results = run_world(
        "with_each_spec",
        ranks(layout),
        of="parity",
        layout=layout,
        directories={family: str(path) for family, path in models.items()},
        batch=batch,
        temperature=0.7,
        out=str(tmp_path),
    )
    for family, path in models.items():
        expected, entropy = reference_log_probs(path, batch, temperature=0.7)
        for spec in SPECS:
            for result in results:
                log_probs, entropies = result[spec][family]
                assert torch.allclose(log_probs, expected, atol=1e-4), (family, spec)
                assert torch.allclose(entropies, entropy, atol=1e-4), (family, spec)
            exported = tmp_path / spec / family
            assert_same_weights(path, exported, rel=0)
            assert json.loads((exported / "config.json").read_text())["vocab_size"] == VOCAB


@pytest.mark.parametrize(
    "name", ["tp2_sp", *(pytest.param(n, marks=pytest.mark.long) for n in ("tp1", "pp2", "vpp2"))]
)
def test_gradients_are_those_of_transformers(
    models: dict[str, Path], shallow: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Of rows that share prompts, and of rows apart."""
    layout, batch = LAYOUTS[name], random_batch(seed=4, group=3, holes=True)
    models = models if layers_for(layout) == 4 else shallow
    run_world(
        "gradients",
        ranks(layout),
        layout=layout,
        directories={family: str(path) for family, path in models.items()},
        batch=batch,
        out=str(tmp_path / "ours"),
    )
    for family, path in models.items():
        theirs = reference_gradients(path, batch, tmp_path / "theirs" / family)
        expected = load_file(theirs / "model.safetensors")
        for way in ("shared", "apart"):
            found = load_file(tmp_path / "ours" / way / family / "model.safetensors")
            gap, weight = widest_gap(found, expected)
            assert gap <= gradient_bound(family, layers_for(layout)), (family, way, weight, gap)


LONG = {"rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG},
    "yarn": {"rope_type": "yarn", **LONG},
    "yarn_set": {"rope_type": "yarn", "attention_factor": 1.6, "truncate": False, **LONG},
}


def test_every_rope_computes_what_transformers_does(tmp_path: Path) -> None:
    """Also beyond the original context of 16 tokens; qwen2 has the keys of transformers 4."""
    batch = random_batch(seed=5, group=3, prompt=40, response=60, holes=True)
    paths = {
        f"{family}_{kind}": save_tiny(
            family, tmp_path / f"{family}_{kind}", num_hidden_layers=2, rope_parameters=dict(rope)
        )
        for family in ("llama", "qwen2")
        for kind, rope in ROPES.items()
    }
    for path in paths.values():
        if path.name.startswith("qwen2"):
            config = json.loads((path / "config.json").read_text())
            scaling = config.pop("rope_parameters")
            config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
            (path / "config.json").write_text(json.dumps(config))
    (result,) = run_world(
        "with_each_spec",
        1,
        of="parity",
        layout={},
        directories={name: str(path) for name, path in paths.items()},
        batch=batch,
        temperature=1.0,
        out=str(tmp_path / "out"),
    )
    distinct = set()
    for name, path in paths.items():
        expected, _ = reference_log_probs(path, batch, temperature=1.0)
        for spec in SPECS:
            gap = float((result[spec][name][0] - expected).abs().max())
            assert gap < 1e-5, (name, spec, gap)
        distinct.add(round(float(expected.sum()), 4))
    assert len(distinct) == len(paths)


@pytest.fixture(scope="module")
def trained_alone(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[dict[str, float]]]]:
    """Three steps of one process: packed in several ways, recomputed, offloaded in between."""
    out = tmp_path_factory.mktemp("alone")
    variants = {
        "one": {"token_budget": 4096},
        "off": {"token_budget": 4096, "shared_prefix": False},
        "many": {"token_budget": 21, "logprob_chunk": 3},
        "recompute": {"token_budget": 64, "build": {"recompute_granularity": "full"}},
        "attention again": {"build": {"recompute_granularity": "selective"}},
        "plain_optimizer": {"optimizer": {"distributed": False}},
        "offloaded": {"make_room": True},
        # The weights are their own master copy; they leave and come back once.
        "offloaded_plain": {"make_room": True, "optimizer": {"distributed": False}},
    }
    (metrics,) = run_world(
        "train",
        1,
        layout={},
        directory=str(models["qwen2_tied"]),
        batch=random_batch(seed=5, rows=8, group=4, holes=True),
        out=str(out),
        variants=variants,
    )
    return out, metrics


def assert_same_metrics(left: list[dict[str, float]], right: list[dict[str, float]]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-9)


def test_packing_recompute_and_offloading_change_nothing(
    trained_alone: tuple[Path, dict[str, list[dict[str, float]]]],
) -> None:
    out, metrics = trained_alone
    for name in metrics:
        assert_same_metrics(metrics["one"], metrics[name])
        assert_same_weights(out / "one", out / name, rel=1e-5)
    assert metrics["one"][0]["loss"] != pytest.approx(metrics["one"][2]["loss"], rel=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        *("pp3", "vpp2", "tp2_pp2_sp", "tp2_pp2_dp2"),
        *(pytest.param(n, marks=pytest.mark.long) for n in ("dp2", "tp2", "tp2_sp")),
    ],
)
def test_layouts_take_the_same_steps(
    models: dict[str, Path],
    trained_alone: tuple[Path, dict[str, list[dict[str, float]]]],
    tmp_path: Path,
    name: str,
) -> None:
    alone, metrics = trained_alone
    results = run_world(
        "train",
        ranks(LAYOUTS[name]),
        layout=LAYOUTS[name],
        directory=str(models["qwen2_tied"]),
        batch=random_batch(seed=5, rows=8, group=4, holes=True),
        out=str(tmp_path),
        variants={
            "shared": {"token_budget": 64},
            "off": {"token_budget": 64, "shared_prefix": False},
        },
    )
    for variant in ("shared", "off"):
        for result in results:
            assert_same_metrics(metrics["one"], result[variant])
        assert_same_weights(alone / "one", tmp_path / variant, rel=1e-5)


def test_any_groups_are_the_same_with_shared_and_with_repeated_prompts(
    models: dict[str, Path],
) -> None:
    (shared,) = run_world("ragged_groups", 1, directory=str(models["qwen3"]), examples=25)
    assert shared > 10


def test_transformer_engines_attention_takes_the_same_steps(
    models: dict[str, Path],
    trained_alone: tuple[Path, dict[str, list[dict[str, float]]]],
    tmp_path: Path,
) -> None:
    """Its variable-length call by a stand-in, whole layers around it."""
    alone, metrics = trained_alone
    selective = {"recompute_granularity": "selective"}
    results = run_world(
        "train",
        2,
        layout=LAYOUTS["tp2_sp"],
        directory=str(models["qwen2_tied"]),
        batch=random_batch(seed=5, rows=8, group=4, holes=True),
        out=str(tmp_path),
        variants={
            "shared": {"token_budget": 64},
            "attention again": {"token_budget": 64, "build": selective},
            "off": {"token_budget": 64, "shared_prefix": False},
        },
        te=True,
    )
    for variant in ("shared", "attention again", "off"):
        for result in results:
            assert_same_metrics(metrics["one"], result[variant])
        assert_same_weights(alone / "one", tmp_path / variant, rel=1e-5)


@pytest.mark.parametrize("name", [pytest.param("dp2", marks=pytest.mark.long), "vpp2_dp2"])
def test_gradients_are_summed_while_the_backward_pass_goes_on(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """To the last digit as afterwards in one go; only the norm's summands are grouped otherwise."""
    layout = (
        {"pipeline": 2, "virtual_pipeline": 2, "data": 2} if name == "vpp2_dp2" else {"data": 2}
    )
    results = run_world(
        "with_each_spec",
        ranks(layout),
        of="reduced",
        layout=layout,
        directory=str(models["qwen2_tied"]),
        batch=random_batch(seed=5, rows=9, holes=True),  # one rank has a micro-batch more
        settings={
            "afterwards": {"overlap_grad_reduce": False},
            "meanwhile": {"bucket_size": 20_000},
        },
        out=str(tmp_path),
    )
    for spec in SPECS:
        for afterwards, meanwhile in (
            (r[spec]["afterwards"], r[spec]["meanwhile"]) for r in results
        ):
            assert afterwards["under_way"] == [0, 0, 0]
            # Megatron learns the order in the first step.
            first, *others = meanwhile["under_way"]
            assert first == 0 and min(others) > 0
            for left, right in zip(afterwards["weights"], meanwhile["weights"], strict=True):
                assert torch.equal(left, right)
            for left, right in zip(afterwards["metrics"], meanwhile["metrics"], strict=True):
                assert left.pop("grad_norm") == pytest.approx(right.pop("grad_norm"), rel=1e-6)
                assert left == right
        assert max(r[spec]["meanwhile"]["under_way"][-1] for r in results) > 2
