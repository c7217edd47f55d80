"""Written adapters of experts and of latent attention, loaded and computed by PEFT itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ctrl_megatron.checkpoint.peft import with_own_matrices, write_peft
from ctrl_megatron.models.hf_config import read_model_shape
from ctrl_megatron.models.lora import shape_with_adapters
from ctrl_megatron.models.rules import ADAPTED, adapter_name, hf_shapes
from ctrl_megatron.types import Lora

VOCAB = 97
_COMMON: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 128, "tie_word_embeddings": False, "initializer_range": 0.2},
}
MODELS = {
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **_COMMON,
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        **{"num_key_value_heads": 2, "head_dim": 16},
    ),
    "mixtral": transformers.MixtralConfig(
        **_COMMON, num_local_experts=4, num_key_value_heads=2, intermediate_size=40
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        **_COMMON,
        **{"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "v_head_dim": 8},
        **{"qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "n_routed_experts": 4, "n_group": 2},
        **{"topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1},
        **{"moe_intermediate_size": 24, "intermediate_size": 40, "first_k_dense_replace": 1},
    ),
}


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3_moe", ("all-linear",)),
        ("qwen3_moe", ("down_proj", "k_proj")),
        ("mixtral", ("all-linear",)),
        # PEFT takes gate_proj of its dense layers for that of experts.
        ("deepseek_v3", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_peft_computes_what_merged_weights_do(
    tmp_path: Path, family: str, targets: tuple[str, ...], shared: bool
) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[family]).eval()
    model.save_pretrained(tmp_path / "base")
    lora = Lora(rank=3, alpha=5.0, targets=targets, shared_outer=shared)
    shape = shape_with_adapters(read_model_shape(tmp_path / "base"), lora)
    assert shape.lora is not None
    tensors = {
        name: 0.3 * torch.randn(size)
        for name, size in hf_shapes(shape).items()
        if name.startswith(ADAPTED)
    }
    (tmp_path / "adapters").mkdir()
    write_peft(tmp_path / "adapters", shape.lora, None, tensors, value_head=False)

    weights = load_file(tmp_path / "base/model.safetensors")
    own = with_own_matrices(tensors)
    for name in weights:
        if (down := own.get(adapter_name(name, "A"))) is not None:
            weights[name] = weights[name] + lora.scale * own[adapter_name(name, "B")] @ down
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged/config.json").write_bytes((tmp_path / "base/config.json").read_bytes())
    save_file(weights, tmp_path / "merged/model.safetensors", metadata={"format": "pt"})
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()

    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapters").eval()
    tokens = torch.randint(VOCAB, (2, 20))
    with torch.no_grad():
        found, wanted = adapted(tokens).logits, merged(tokens).logits
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    with torch.no_grad(), adapted.disable_adapter():
        plain = adapted(tokens).logits
    assert (plain - wanted).abs().max() > 0.05 * wanted.abs().max()
