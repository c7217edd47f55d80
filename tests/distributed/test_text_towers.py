"""The language models of directories whose models read pictures too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import (
    random_batch,
    reference_log_probs,
    save_tiny,
    weights_of,
    with_pictures,
)
from world import run_world

from ctrl_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf

FAMILIES = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}


def files(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of all files of a directory."""
    found = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_same(left: Path, right: Path) -> None:
    there, here = files(left), files(right)
    assert there.keys() == here.keys()
    for name, tensor in there.items():
        assert tensor.dtype == here[name].dtype and torch.equal(tensor, here[name]), name


@pytest.mark.parametrize(
    "family", [pytest.param("qwen3_5_text", marks=pytest.mark.long), "qwen3_5_moe_text"]
)
def test_they_are_trained_and_exports_keep_the_rest(tmp_path: Path, family: str) -> None:
    text = save_tiny(family, tmp_path / "text", num_hidden_layers=2)
    whole = with_pictures(text, tmp_path / "whole", FAMILIES[family])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    for name, weight in (
        transformers.AutoModelForCausalLM.from_pretrained(text).state_dict().items()
    ):
        assert torch.equal(weight, loaded.state_dict()[name])
    batch = random_batch(seed=3, group=3)
    results = run_world(
        "parity",
        2,
        layout={"tensor": 2, "sequence_parallel": True},
        directories={"whole": str(whole), "text": str(text)},
        batch=batch,
        temperature=0.7,
        out=str(tmp_path / "out"),
    )
    expected, _ = reference_log_probs(text, batch, temperature=0.7)
    for result in results:
        assert torch.allclose(result["whole"][0], expected, atol=1e-5)
        assert torch.equal(result["whole"][0], result["text"][0])
    assert_same(whole, tmp_path / "out/whole")
    ours, theirs = weights_of(tmp_path / "out/text"), weights_of(text)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversions_keep_every_byte(tmp_path: Path, family: str) -> None:
    text = save_tiny(family, tmp_path / "text", torch.bfloat16, num_hidden_layers=2)
    whole = with_pictures(text, tmp_path / "whole", FAMILIES[family])
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    for source in (whole, text):
        hf_to_megatron(source, tmp_path / f"{source.name}_checkpoint")
        megatron_to_hf(tmp_path / f"{source.name}_checkpoint", tmp_path / f"{source.name}_back")
    assert_same(whole, tmp_path / "whole_back")
    ours, theirs = weights_of(tmp_path / "text_back"), weights_of(text)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    again = json.loads((tmp_path / "whole_back/config.json").read_text())
    assert again == json.loads((whole / "config.json").read_text())
