"""Weights on disk: fingerprints, and what the 8 bits of published models mean."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ctrl_megatron.checkpoint.convert import hf_to_megatron, megatron_to_hf
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


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/elsewhere.safetensors", "..", 1])
def test_an_index_names_files_beside_it_only(tmp_path: Path, file: Any) -> None:
    save_file(WEIGHTS, tmp_path / "elsewhere.safetensors")
    index = tmp_path / "model/model.safetensors.index.json"
    index.parent.mkdir()
    index.write_text(json.dumps({"weight_map": dict.fromkeys(WEIGHTS, file)}))
    with pytest.raises(UserError, match="no file beside it"):
        SafetensorsDirectory(index.parent).shapes()


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


BLOCK = (16, 12)


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(8-bit weight, scales, the values that both mean), block by block."""
    rows, columns = (-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True))
    scales, small, values = torch.zeros(rows, columns), torch.zeros_like(weight), weight.clone()
    for i in range(rows):
        for j in range(columns):
            at = (slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1]))
            scales[i, j] = weight[at].abs().max() / 448
            small[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn).float()
            values[at] = small[at] * scales[i, j]
    return small.to(torch.float8_e4m3fn), scales, values


def write_quantised(
    folder: Path, family: str = "deepseek_v3"
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A tiny DeepSeek-V3 as it is published: 8 bits and a layer that predicts further tokens.
    Returns its config.json and the values of the tensors that are read."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 24}
    latent = {"q_lora_rank": 20, "kv_lora_rank": 18, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    config = CONFIG_MAPPING[family](
        **{**sizes, **latent, **experts, **groups},
        **{"v_head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 2},
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    values, written = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values[name] = written[name] = tensor
        if "_proj" in name and "embed" not in name:
            weight, scales, values[name] = quantised(tensor)
            written |= {name: weight, f"{name}_scale_inv": scales}
        if name.startswith("model.layers.1."):
            further = name.replace("model.layers.1.", "model.layers.2.")
            written[further] = written[name].clone()
        if ".indexer." in name:
            del values[name]
    save_file(written, folder / "model.safetensors")
    file = folder / "config.json"
    own = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    published = json.loads(file.read_text()) | {
        **{"quantization_config": own, "num_nextn_predict_layers": 1, "dtype": "bfloat16"}
    }
    file.write_text(json.dumps(published))
    return published, values


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_a_quantised_model_is_converted_into_what_its_weights_mean(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, values = write_quantised(tmp_path / "published", family)
    hf_to_megatron(tmp_path / "published", tmp_path / "checkpoint")
    (warning,) = [line for line in caplog.messages if "left out" in line]
    first = {"deepseek_v3": "2.input_layernorm", "deepseek_v32": "0.self_attn.indexer.k_norm"}
    assert f" model.layers.{first[family]}." in warning
    megatron_to_hf(tmp_path / "checkpoint", tmp_path / "out")
    found = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(path)
    # Indexers of layers that stay are kept, three weights and a norm with a bias each.
    kept = {name: found.pop(name) for name in [*found] if ".indexer." in name}
    assert len(kept) == (2 * 5 if family == "deepseek_v32" else 0)
    assert {tensor.dtype for tensor in kept.values()} <= {torch.bfloat16, torch.float32}
    assert found.keys() == values.keys()
    for name, want in values.items():
        bias = name.endswith("e_score_correction_bias")
        assert torch.equal(found[name], want if bias else want.bfloat16()), name
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config and config["num_nextn_predict_layers"] == 0
    plain = SafetensorsDirectory(tmp_path / "out")
    plain.check(read_model_shape(tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.model.norm.weight, found["model.norm.weight"])


def test_rectangles_of_a_quantised_weight_are_those_of_the_whole(tmp_path: Path) -> None:
    _, values = write_quantised(tmp_path)
    tensors = SafetensorsDirectory(tmp_path)
    tensors.check(read_model_shape(tmp_path))
    assert not [name for name in tensors.shapes() if name.startswith("model.layers.2.")]
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(tensors.read(name), values[name])
    for rows, columns in ((slice(3, 17), slice(11, 25)), (slice(16, 32), slice(0, 40))):
        assert torch.equal(tensors.read_part(name, (rows, columns)), values[name][rows, columns])
    assert torch.equal(tensors.read_part(name, (slice(0, 1),)), values[name][:1])


def test_a_quantised_weight_without_its_scales_is_refused(tmp_path: Path) -> None:
    published, _ = write_quantised(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.down_proj.weight_scale_inv"
    written = load_file(file)
    for scales, named in ((None, "F8_E4M3"), (torch.ones(2, 3), "not \\(2, 4\\)")):
        save_file({k: v for k, v in {**written, name: scales}.items() if v is not None}, file)
        with pytest.raises(UserError, match=named):
            SafetensorsDirectory(tmp_path).check(read_model_shape(tmp_path))
    save_file(written, file)
    (tmp_path / "config.json").write_text(json.dumps({**published, "quantization_config": None}))
    with pytest.raises(UserError, match=r"unexpected .*weight_scale_inv"):
        SafetensorsDirectory(tmp_path).check(read_model_shape(tmp_path))
