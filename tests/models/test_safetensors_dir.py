"""Fingerprints of weights on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.hf_config import read_model_shape
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


def test_two_models_in_one_directory_are_refused(tmp_path: Path) -> None:
    write(tmp_path, WEIGHTS)
    save_file(WEIGHTS, tmp_path / "part.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(WEIGHTS, "part.safetensors")}))
    with pytest.raises(UserError, match="holds two models"):
        SafetensorsDirectory(tmp_path)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(WEIGHTS, "model.safetensors")}))
    assert SafetensorsDirectory(tmp_path).shapes().keys() == WEIGHTS.keys()


def test_a_tied_head_that_is_stored_too_must_equal_the_embedding(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    shape, file = read_model_shape(tmp_path), tmp_path / "model.safetensors"
    head = {"lm_head.weight": load_file(file)["model.embed_tokens.weight"].clone()}
    save_file(load_file(file) | head, file)
    SafetensorsDirectory(tmp_path).check(shape)
    head["lm_head.weight"][1, 1] += 1
    save_file(load_file(file) | head, file)
    with pytest.raises(UserError, match="differs from the embedding"):
        SafetensorsDirectory(tmp_path).check(shape)


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
