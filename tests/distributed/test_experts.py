"""Models with experts against transformers, in real gloo processes: log-probs, weights, gradients.

transformers keeps the experts of a layer in one tensor, so files are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from te_stand_ins import SPECS
from tiny_models import EXPERTS, random_batch, reference_gradients, reference_log_probs, save_tiny
from world import run_world

from ctrl_megatron.parallel.layout import Layout

TENSOR: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "dp2": {"data": 2},
    "tp2": TENSOR,
    "tp2_etp1": TENSOR | {"expert_tensor": 1},
    "tp2_ep2_etp1": TENSOR | {"expert": 2, "expert_tensor": 1},
    "pp2": {"pipeline": 2},
    "ep2": {"data": 2, "expert": 2},
    "etp2": {"data": 2, "expert_tensor": 2},
    "ep2_of_4": {"data": 4, "expert": 2},
    "pp2_ep2": {"pipeline": 2, "data": 2, "expert": 2},
    "tp2_ep2": TENSOR | {"data": 2, "expert": 2},
    "tp2_ep4_etp1": TENSOR | {"data": 2, "expert": 4, "expert_tensor": 1},
}


def ranks(layout: dict[str, Any]) -> int:
    return Layout(**layout).world_size


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(name, root / name, num_hidden_layers=2) for name in EXPERTS}


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("name", LAYOUTS)
def test_log_probs_are_those_of_transformers_and_the_export_is_the_import(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    layout, batch = LAYOUTS[name], random_batch(seed=3, group=3)
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
        before = weights_of(path)
        for spec in SPECS:
            for result in results:
                log_probs, entropies = result[spec][family]
                assert torch.allclose(log_probs, expected, atol=1e-5), (family, spec)
                assert torch.allclose(entropies, entropy, atol=1e-5), (family, spec)
            after = weights_of(tmp_path / spec / family)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_transformers(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    layout, batch = LAYOUTS[name], random_batch(seed=4, group=3)
    run_world(
        "with_each_spec",
        ranks(layout),
        of="gradients",
        layout=layout,
        directories={family: str(path) for family, path in models.items()},
        batch=batch,
        out=str(tmp_path),
    )
    for family, path in models.items():
        expected = weights_of(reference_gradients(path, batch, tmp_path / "theirs" / family))
        for spec in SPECS:
            for way in ("shared", "apart"):
                found = weights_of(tmp_path / spec / way / family)
                assert expected.keys() == found.keys()
                for name, want in expected.items():
                    gap = (found[name] - want).norm() / want.norm()
                    assert gap <= 1e-5, (family, spec, way, name, float(gap))
