"""The tensors of a directory inside transformers' parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from ctrl_megatron.models.fp8 import SCALES, quantised_specs
from ctrl_megatron.rollout.hf_weights import QuantisedWeights, weight_views_by_name
from ctrl_megatron.rollout.weight_update import checkpoint_specs
from ctrl_megatron.types import TensorSpec

DIMS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN3_MOE = {"num_experts": 5, "moe_intermediate_size": 12, "mlp_only_layers": [1]}
DEEPSEEK_V3 = {
    **{"num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 8, "qk_rope_head_dim": 4},
    **{"n_routed_experts": 4, "moe_intermediate_size": 12, "n_group": 2, "topk_group": 1},
    **{"num_experts_per_tok": 2, "first_k_dense_replace": 1},
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, QWEN3_MOE),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 3}),
    "deepseek_v3": (transformers.DeepseekV3Config, DEEPSEEK_V3),
}


@pytest.mark.parametrize("family", MODELS)
def test_every_parameter_is_covered_once_by_the_files_tensors(family: str, tmp_path: Path) -> None:
    kind, own = MODELS[family]
    config = kind(**{**DIMS, **own})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    views = weight_views_by_name(model, checkpoint_specs(tmp_path, "float32"))
    files = load_file(tmp_path / "model.safetensors")
    assert views.keys() == files.keys()
    assert all(torch.equal(view, files[name]) for name, view in views.items())
    assert all(view.dtype == files[name].dtype for name, view in views.items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for view in views.values():
            view.add_(1)
        assert all(bool((parameter == 1).all()) for parameter in model.parameters())


def test_a_tensor_in_another_form_is_named(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**DIMS))
    asked = [
        TensorSpec(name=name, dtype="float32", shape=shape)
        for name, shape in {"model.norm.weight": (25,), "model.bell.weight": (24,)}.items()
    ]
    with pytest.raises(ValueError, match=r"2 tensors .*: model\.norm\.weight, model\.bell\.weight"):
        weight_views_by_name(model, asked)


@torch.no_grad()
def test_weights_in_8_bits_are_multiplied_out(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(**{**DIMS, "hidden_size": 136, **QWEN3_MOE})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    manifest = checkpoint_specs(tmp_path, "float32")
    views = weight_views_by_name(model, manifest)
    before = {name: view.clone() for name, view in views.items()}
    weights = QuantisedWeights(views, tuple(quantised_specs(manifest)))
    changed = {name for name, view in views.items() if not torch.equal(view, before[name])}
    scaled = {name.removesuffix(SCALES) for name in weights.held if name.endswith(SCALES)}
    assert changed == scaled == {name for name in views if "_proj.weight" in name}
    for name in changed:
        assert (views[name] - before[name]).abs().max() < before[name].abs().max() / 16
    # What an update brings replaces both.
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    weights.held[name].copy_(torch.full(before[name].shape, 2.0))
    weights.held[name + SCALES].copy_(torch.tensor([[3.0, 5.0]]))
    weights.dequantise_into_model([name, name + SCALES])
    assert views[name][:, :128].unique().tolist() == [6.0]
    assert views[name][:, 128:].unique().tolist() == [10.0]
