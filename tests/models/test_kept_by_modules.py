"""What a pass of a model of transformers keeps, against transformers' own passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ctrl_megatron.models.hf_config import parse_shape
from ctrl_megatron.models.kept_by_modules import count_activation_bytes
from ctrl_megatron.models.shape import TransformersShape

SIZES = {
    **{"vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def kept_by(model: Any, tokens: int) -> int:
    """Bytes that a real pass keeps for its backward pass, beside the model's own tensors."""
    own = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.arange(tokens)[None] % 300
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found = model.base_model(ids, use_cache=False)
    assert found.last_hidden_state.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


WINDOW = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 256}),
    "granite": ("granite", {}),
    "phi3": ("phi3", {}),
    "phi3 longrope": ("phi3", {"original_max_position_embeddings": 64, "rope_parameters": LONG}),
    "smollm3": ("smollm3", {}),
    "gemma3_text": ("gemma3_text", {"head_dim": 16, "sliding_window": 256, **WINDOW}),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *(("llama", "float32"), ("llama", "bfloat16"), ("granite", "bfloat16")),
        *((case, "float32") for case in CASES if case != "llama"),
    ],
)
def test_a_pass_keeps_what_it_is_planned_to(case: str, dtype: str) -> None:
    family, keys = CASES[case]
    config = transformers.CONFIG_MAPPING[family](**SIZES, **keys)
    shape = parse_shape(json.loads(config.to_json_string(use_diff=False)), "here", "fsdp")
    assert isinstance(shape, TransformersShape)
    planned = count_activation_bytes(shape, dtype)
    kind = getattr(torch, dtype)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=kind, attn_implementation="sdpa"
    )
    assert planned.layers == pytest.approx(3 * planned.layer, rel=0.05)
    measured = kept_by(model.train(), 192) / 192
    assert planned.layers + planned.outside == pytest.approx(measured, rel=0.05)


def test_the_example_has_the_shape_of_its_model() -> None:
    file = Path(__file__).parents[2] / "examples/shapes/smollm3-3b.json"
    shape = parse_shape(json.loads(file.read_text()), str(file), "fsdp")
    assert isinstance(shape, TransformersShape)
    elements = sum(torch.Size(tensor.shape).numel() for _, tensor in shape.tensors)
    assert elements == pytest.approx(3.08e9, rel=0.01)
