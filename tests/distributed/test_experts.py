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

LAYOUTS: dict[str, dict[str, Any]] = {"tp1": {}, "pp2": {"pipeline": 2}}


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
        layout.get("pipeline", 1),
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


@pytest.mark.parametrize("layout", [{}, {"data": 2}], ids=["tp1", "dp2"])
def test_gradients_are_those_of_transformers(
    models: dict[str, Path], tmp_path: Path, layout: dict[str, Any]
) -> None:
    batch = random_batch(seed=4, group=3)
    run_world(
        "with_each_spec",
        layout.get("data", 1),
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
                    gap = (found[name] - want).norm()  # 0 for an expert that no token passes
                    assert gap <= 1e-5 * want.norm(), (family, spec, way, name, float(gap))
