"""vLLM's own loaders take the weights in 8 bits that a push sends."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from free_port import free_port
from safetensors.torch import load_file

from ctrl_megatron.models.fp8 import (
    SCALES,
    block_maxima,
    block_scales,
    misaligned_part_widths,
    quantise,
)
from ctrl_megatron.models.hf_config import parse_model_shape
from ctrl_megatron.rollout.engine import EngineSpec
from ctrl_megatron.rollout.weight_update import updated_tensor_specs

pytestmark = pytest.mark.long
vllm = pytest.importorskip("vllm")


def test_vllms_model_has_the_bytes_that_were_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers get no kernel, because a CPU without AMX has none."""
    import transformers
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader.utils import initialize_model

    from ctrl_megatron.rollout.vllm_engine import engine_args

    config = transformers.Qwen3Config(
        **{"vocab_size": 96, "hidden_size": 256, "intermediate_size": 384, "head_dim": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    spec = EngineSpec(
        name="vllm", model_path=str(tmp_path), max_model_len=64, awaits_weights=True, quantised=True
    )
    sent: dict[str, torch.Tensor] = {}
    files = load_file(tmp_path / "model.safetensors")
    for tensor in updated_tensor_specs(spec):
        if (whole := files.get(tensor.name)) is not None and tensor.dtype == "bfloat16":
            sent[tensor.name] = whole
        elif whole is not None:
            scales = block_scales(block_maxima(whole, (0, 0)))
            sent |= {tensor.name: quantise(whole, scales, (0, 0)), tensor.name + SCALES: scales}
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: None)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    chosen = engine_args(spec).create_engine_config()
    assert chosen.load_config.load_format == "dummy", "a push brings them"
    with set_current_vllm_config(chosen):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        try:
            initialize_model_parallel()
            model = initialize_model(chosen)
            loaded = model.load_weights(sent.items())
            held = dict(model.named_parameters())
        finally:
            cleanup_dist_env_and_memory()
    # The scales of a quantised cache of keys and values have defaults.
    assert loaded == {name for name in held if ".self_attn.attn." not in name}
    for layer in ("model.layers.0.", "model.layers.1."):
        for own, fused in (
            (("q_proj", "k_proj", "v_proj"), "self_attn.qkv_proj"),
            (("o_proj",), "self_attn.o_proj"),
            (("gate_proj", "up_proj"), "mlp.gate_up_proj"),
            (("down_proj",), "mlp.down_proj"),
        ):
            module = layer + fused.rpartition(".")[0]
            for end in (".weight", ".weight" + SCALES):
                whole = torch.cat([sent[f"{module}.{name}{end}"] for name in own])
                found = held[layer + fused + end]
                assert found.dtype == whole.dtype and found.shape == whole.shape
                assert torch.equal(found.view(torch.uint8), whole.view(torch.uint8))


def test_vllm_refuses_what_the_configuration_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    def vllm_takes(heads: int, groups: int, width: int, workers: int) -> bool:
        """The joined weights and the outputs of a layer whose heads have 64 numbers."""
        layer: Any = SimpleNamespace(tp_size=workers)
        queries, keys = heads * 64 // workers, max(1, groups // workers) * 64
        halves, hidden = width // workers, 256
        try:
            for size, into, out in (
                (hidden, hidden, [queries, keys, keys]),
                (hidden, hidden, [halves, halves]),
                (heads * 64, queries, [hidden]),
                (width, halves, [hidden]),
            ):
                whole = sum(out) * (workers if into == size else 1)
                fp8_utils.validate_fp8_block_shape(layer, size, whole, into, out, [128, 128])
        except ValueError:
            return False
        return True

    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_world_size", lambda: 1)
    seen = set()
    for heads, groups, width, workers in itertools.product(
        (4, 8, 9, 16), (1, 2, 4, 8), (128, 192, 256, 512), (1, 2, 4)
    ):
        if heads % workers or heads % groups:
            continue
        config = {
            **{"model_type": "llama", "vocab_size": 96, "num_hidden_layers": 1, "head_dim": 64},
            **{"hidden_size": 256, "num_attention_heads": heads, "intermediate_size": width},
            **{"num_key_value_heads": groups, "rms_norm_eps": 1e-5, "max_position_embeddings": 64},
        }
        shape = parse_model_shape(config, "config.json")
        ours = not misaligned_part_widths(shape, workers, whole_experts=False)
        assert ours == vllm_takes(heads, groups, width, workers), (heads, groups, width, workers)
        seen.add(ours)
    assert seen == {True, False}
