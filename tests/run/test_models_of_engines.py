"""What engines cannot take is refused of the models that they generate with, and of no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctrl_megatron.config import load_config
from ctrl_megatron.errors import UserError
from ctrl_megatron.run.checks.models import check_model_files
from tests.mistakes.mistaken_world import write_model

CUT = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 128, "vocab_size": 64}
ROLLOUT = "actor_rollout_ref.rollout."
EIGHT_BITS = [
    "actor_rollout_ref.model.path=actor",
    "actor_rollout_ref.ref.model.path=reference",
    "actor_rollout_ref.actor.use_kl_loss=true",
    f"{ROLLOUT}name=vllm",
    f"{ROLLOUT}quantization=fp8",
    "algorithm.rollout_correction.rollout_is=token",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_reference_may_have_any_widths_beside_engines_in_8_bits(folder: Path) -> None:
    write_model(folder / "actor", **CUT)
    write_model(folder / "reference", **CUT | {"intermediate_size": 192, "head_dim": 32})
    check_model_files(load_config(None, EIGHT_BITS, "none"), "rl")


def test_every_part_of_an_actor_that_blocks_do_not_divide_is_named(folder: Path) -> None:
    write_model(folder / "actor", **CUT | {"intermediate_size": 192, "head_dim": 96})
    write_model(folder / "reference", **CUT)
    parts = "the keys are 192 wide and the feed-forward layers are 192 wide, which is no multiple"
    with pytest.raises(UserError, match=parts):
        check_model_files(load_config(None, EIGHT_BITS, "none"), "rl")


def test_adapters_on_experts_go_alone_to_engines_that_compute_them(folder: Path) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    experts |= {"moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1}
    write_model(folder / "actor", **experts)
    base = ["actor_rollout_ref.model.path=actor", "actor_rollout_ref.model.lora_rank=4"]
    vllm = [*base, f"{ROLLOUT}name=vllm"]
    check_model_files(load_config(None, [*base, f"{ROLLOUT}name=hf"], "none"), "rl")
    with pytest.raises(UserError, match=r"no adapters on the experts of actor here.*to false"):
        check_model_files(load_config(None, vllm, "none"), "rl")
    attention = "actor_rollout_ref.model.target_modules=[q_proj,o_proj]"
    for key in (f"{ROLLOUT}adapter_push=false", attention):
        check_model_files(load_config(None, [*vllm, key], "none"), "rl")


@pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
def test_engines_without_kernels_for_gated_delta_nets_are_refused_on_a_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    net = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 16}
    net |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "full_attention_interval": 4}
    kind = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    write_model(folder / "actor", **kind, **net, num_hidden_layers=4)
    base = ["actor_rollout_ref.model.path=actor", f"actor_rollout_ref.actor.strategy={strategy}"]

    def check(*keys: str) -> None:
        check_model_files(load_config(None, [*base, *keys], "none"), "rl")

    monkeypatch.setattr("ctrl_megatron.run.checks.models.visible_gpus", lambda: 0)
    single = f"{ROLLOUT}dtype=float32"
    check(f"{ROLLOUT}name=vllm")
    check(f"{ROLLOUT}name=hf", single)
    with pytest.raises(UserError, match=r"rollout\.name: actor: .* in bfloat16 only.*use hf"):
        check(f"{ROLLOUT}name=vllm", single)
    with pytest.raises(UserError, match=r"rollout\.name: actor: no published build.*use hf"):
        check(f"{ROLLOUT}name=sglang")
    monkeypatch.setattr("ctrl_megatron.run.checks.models.visible_gpus", lambda: 1)
    check(f"{ROLLOUT}name=vllm", single)
    check(f"{ROLLOUT}name=sglang")


def test_a_reference_may_have_weights_in_8_bits_and_an_actor_may_not(folder: Path) -> None:
    block = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    write_model(folder / "actor", **CUT)
    write_model(folder / "reference", **CUT, **block)
    check_model_files(load_config(None, EIGHT_BITS, "none"), "rl")
    swapped = ["actor_rollout_ref.model.path=reference", "actor_rollout_ref.ref.model.path=actor"]
    with pytest.raises(UserError, match="the weights of reference have 8 bits"):
        check_model_files(load_config(None, [*EIGHT_BITS, *swapped], "none"), "rl")
