"""Fingerprints of weights on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory

WEIGHTS = {
    "a": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    "b": torch.ones(5),
    "c": torch.zeros(()),
}


def write(folder: Path, weights: dict[str, torch.Tensor]) -> str:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    return SafetensorsDirectory(folder).fingerprint()


def test_the_same_weights_have_one_fingerprint_wherever_they_lie(tmp_path: Path) -> None:
    found = write(tmp_path / "one", WEIGHTS)
    assert len(found) == 16 and int(found, 16)
    os.utime(tmp_path / "one/model.safetensors", (1, 1))
    assert SafetensorsDirectory(tmp_path / "one").fingerprint() == found
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, tensor in WEIGHTS.items():
        save_file({name: tensor}, parts / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in reversed(WEIGHTS)}}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    assert SafetensorsDirectory(parts).fingerprint() == found


@pytest.mark.parametrize(
    "change",
    [
        *({name: tensor + 1} for name, tensor in WEIGHTS.items()),
        {"a": WEIGHTS["a"].float()},
        {"a": WEIGHTS["a"].reshape(4, 3)},
        {"d": torch.zeros(1)},
    ],
)
def test_other_weights_have_another_fingerprint(
    tmp_path: Path, change: dict[str, torch.Tensor]
) -> None:
    assert write(tmp_path / "before", WEIGHTS) != write(tmp_path / "after", WEIGHTS | change)
