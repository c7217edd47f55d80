from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ctrl_megatron.engine_kinds import ENGINES, EngineName
from ctrl_megatron.errors import UserError
from ctrl_megatron.models.families import (
    FAMILIES,
    cpu_delta_net_obstacle,
    engine_mismatch_reason,
)
from ctrl_megatron.models.hf_config import parse_model_shape, read_model_shape, read_shape
from ctrl_megatron.models.rope import Llama3Scaling, Rope, engine_rope_mismatch, rope_frequencies
from ctrl_megatron.models.rules import hf_shapes
from ctrl_megatron.models.shape import (
    Dense,
    Experts,
    GatedDeltaNet,
    GroupedQueryAttention,
    MaskedDiffusion,
    ModelShape,
    MultiLatentAttention,
    context_of,
)
from ctrl_megatron.types import StrategyName

LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# The dimensions of published models, as transformers 4 wrote them.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
LLAMA31 = {
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {**LLAMA3_ROPE, "rope_type": "llama3"},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN25 = {
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
# https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite and DeepSeek-V3-Base, the latter without the
# keys of its quantisation.
DEEPSEEK = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "ep_size": 1,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
DEEPSEEK_YARN = {
    **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096},
    "type": "yarn",
}
DEEPSEEK_V2_LITE = {
    **DEEPSEEK,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
DEEPSEEK_V3 = {
    **DEEPSEEK,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "rope_scaling": {**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
# The layers of DeepSeek-V3.2 are those of DeepSeek-V3 but for the indexers.
DEEPSEEK_V32 = {
    **{key: value for key, value in DEEPSEEK_V3.items() if key != "auto_map"},
    **{"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
    **{"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
    "num_nextn_predict_layers": 1,
}
SHAPES = Path(__file__).parents[2] / "examples/shapes"
GLM45_AIR = json.loads((SHAPES / "glm-4.5-air.json").read_text())
EXPERTS = {
    "glm4_moe": GLM45_AIR,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "deepseek_v2": DEEPSEEK_V2_LITE,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
}
DELTA_NET = {
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 16, "head_dim": 256, "hidden_act": "silu", "rms_norm_eps": 1e-06},
    **{"full_attention_interval": 4, "max_position_embeddings": 262144, "attention_dropout": 0.0},
    **{"num_key_value_heads": 2, "router_aux_loss_coef": 0.001, "use_cache": True},
    **{"mlp_only_layers": [], "initializer_range": 0.02, "num_experts": 512},
}
QWEN3_NEXT = {
    **{**DELTA_NET, "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]},
    **{"decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5120},
    **{"linear_num_value_heads": 32, "moe_intermediate_size": 512, "norm_topk_prob": True},
    **{"num_attention_heads": 16, "num_experts_per_tok": 10, "num_hidden_layers": 48},
    **{"output_router_logits": False, "partial_rotary_factor": 0.25, "rope_scaling": None},
    **{"rope_theta": 10000000, "shared_expert_intermediate_size": 512, "vocab_size": 151936},
    **{"tie_word_embeddings": False, "use_sliding_window": False, "torch_dtype": "bfloat16"},
}
QWEN35_397B = {
    **{"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"},
    **{"image_token_id": 248056, "video_token_id": 248057, "tie_word_embeddings": False},
    **{"vision_end_token_id": 248054, "vision_start_token_id": 248053},
    **{"language_model_only": False, "vision_config": {"depth": 27}},
    "text_config": {
        **{**DELTA_NET, "model_type": "qwen3_5_moe_text", "attn_output_gate": True},
        **{"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15},
        **{"attention_bias": False, "dtype": "bfloat16", "eos_token_id": 248044},
        **{"hidden_size": 4096, "linear_num_value_heads": 64, "moe_intermediate_size": 1024},
        **{"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False},
        **{"num_attention_heads": 32, "num_experts_per_tok": 10, "num_hidden_layers": 60},
        **{"shared_expert_intermediate_size": 1024, "vocab_size": 248320},
        **{"mamba_ssm_dtype": "float32", "output_gate_type": "swish"},
        "rope_parameters": {
            **{"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_theta": 10000000},
            **{"partial_rotary_factor": 0.25, "rope_type": "default"},
        },
    },
}
DREAM = {
    **{key: value for key, value in QWEN25.items() if key != "rope_scaling"},
    **{"model_type": "Dream", "architectures": ["DreamModel"], "mask_token_id": 151666},
    "auto_map": {"AutoModel": "modeling_dream.DreamModel"},
}
LLADA = {
    **{"model_type": "llada", "architectures": ["LLaDAModelLM"], "mask_token_id": 126336},
    "auto_map": {"AutoModelForCausalLM": "modeling_llada.LLaDAModelLM"},
    **{"activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "attention_dropout": 0.0},
    **{"attention_layer_norm": False, "attention_layer_norm_with_affine": True},
    **{"bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama"},
    **{"d_model": 4096, "embedding_dropout": 0.0, "embedding_size": 126464},
    **{"eos_token_id": 126081, "flash_attention": False, "include_bias": False},
    **{"include_qkv_bias": False, "init_cutoff_factor": None, "init_device": "meta"},
    **{"init_fn": "mitchell", "init_std": 0.02, "input_emb_norm": False},
    **{"layer_norm_type": "rms", "layer_norm_with_affine": True, "max_sequence_length": 4096},
    **{"mlp_hidden_size": 12288, "mlp_ratio": 4, "multi_query_attention": None},
    **{"n_heads": 32, "n_kv_heads": 32, "n_layers": 32, "pad_token_id": 126081},
    **{"precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-05, "rope": True},
    **{"rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False},
    **{"use_cache": False, "vocab_size": 126464, "weight_tying": False},
}
MODELS = {"smollm2": SMOLLM2, "llama31": LLAMA31, "qwen25": QWEN25, "qwen3": QWEN3}


def as_transformers_5(config: dict[str, Any]) -> dict[str, Any]:
    new = copy.deepcopy(config)
    scaling = new.pop("rope_scaling", None) or {"rope_type": "default"}
    new["rope_parameters"] = {**scaling, "rope_theta": new.pop("rope_theta")}
    if new["model_type"].startswith("qwen"):
        new["layer_types"] = ["full_attention"] * new["num_hidden_layers"]
    return new


@pytest.mark.parametrize(
    ("config", "billions", "delta", "last"),
    [(QWEN3_NEXT, 79.7, 36, 47), (QWEN35_397B, 396.4, 45, 59)],
    ids=["Qwen3-Next-80B-A3B", "Qwen3.5-397B-A17B"],
)
def test_published_models_with_gated_delta_nets_are_read(
    config: dict[str, Any], billions: float, delta: int, last: int
) -> None:
    """As their authors count them, without pictures and further tokens."""
    shape = parse_model_shape(config)
    assert shape.delta_net is not None and len(shape.delta_layers) == delta
    assert shape.attention_layers[-1] == last and shape.attention.rotary_width == 64
    counted = sum(math.prod(size) for size in hf_shapes(shape).values())
    assert counted / 1e9 == pytest.approx(billions, abs=0.1)


@pytest.mark.parametrize(
    ("key", "value"),
    [("attn_output_gate", False), ("output_gate_type", "none"), ("mlp_only_layers", [1])],
)
def test_what_no_class_of_transformers_computes_is_refused(key: str, value: Any) -> None:
    inner = {**QWEN35_397B["text_config"], key: value}
    with pytest.raises(UserError, match=f"{key}="):
        parse_model_shape({**QWEN35_397B, "text_config": inner})


def test_keys_beside_a_language_model_are_known_or_refused() -> None:
    with pytest.raises(UserError, match="fused=1 is not supported beside text_config"):
        parse_model_shape({**QWEN35_397B, "fused": 1})
    with pytest.raises(UserError, match="tie_word_embeddings differs from that of text_config"):
        parse_model_shape({**QWEN35_397B, "tie_word_embeddings": True})


def test_every_number_of_a_published_model_is_read() -> None:
    assert parse_model_shape(LLAMA31) == ModelShape(
        family="llama",
        hidden_size=4096,
        attention=GroupedQueryAttention(heads=32, groups=8, head_dim=128),
        feed_forward=(Dense(width=14336),) * 32,
        vocab_size=128256,
        max_position_embeddings=131072,
        norm_epsilon=1e-5,
        rope=Rope(
            theta=5e5,
            scaling=Llama3Scaling(
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
        tied_embeddings=False,
    )
    small, qwen25, qwen3 = (parse_model_shape(c) for c in (SMOLLM2, QWEN25, QWEN3))
    assert small.attention == GroupedQueryAttention(heads=9, groups=3, head_dim=64)
    assert (small.tied_embeddings, small.rope) == (True, Rope(theta=1e5))
    assert qwen25.attention == GroupedQueryAttention(
        heads=28, groups=4, head_dim=128, qkv_bias=True
    )
    assert not qwen25.tied_embeddings
    assert qwen3.attention == GroupedQueryAttention(heads=16, groups=8, head_dim=128, qk_norm=True)


def test_masked_diffusion_models_are_read_and_their_code_is_not_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dream, llada = (parse_model_shape(config, name) for name, config in DIFFUSION.items())
    assert dream.diffusion == MaskedDiffusion(mask_token=151666, shifted=True)
    assert dream == replace(parse_model_shape(QWEN25), family="Dream", diffusion=dream.diffusion)
    assert llada.diffusion == MaskedDiffusion(mask_token=126336, shifted=False)
    assert llada.attention == GroupedQueryAttention(heads=32, groups=32, head_dim=128)
    assert (llada.max_position_embeddings, llada.rope) == (4096, Rope(theta=5e5))
    published = {"Dream": 7_615_616_512, "llada": 8_015_581_184}
    for shape in (dream, llada):
        assert sum(map(math.prod, hf_shapes(shape).values())) == published[shape.family]
    warned = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in warned] == ["dream", "llada"]
    assert all("auto_map" in text for text in warned)


DIFFUSION = {"dream": DREAM, "llada": LLADA}


@pytest.mark.parametrize(
    ("model", "change", "named"),
    [
        ("dream", {"mask_token_id": None}, "mask_token_id=None .* 0 to 152063"),
        ("dream", {"mask_token_id": 152064}, "mask_token_id=152064"),
        ("dream", {"mask_token_id": True}, "mask_token_id=True"),
        ("dream", {"architectures": ["Qwen2ForCausalLM"]}, r"only \*DreamModel"),
        ("llada", {"weight_tying": True}, "weight_tying=True .* only False"),
        ("llada", {"include_qkv_bias": True}, "include_qkv_bias=True"),
        ("llada", {"activation_type": "swiglu"}, "activation_type='swiglu'"),
        ("llada", {"block_type": "sequential"}, "block_type='sequential'"),
        ("llada", {"block_type": None}, "block_type=None .* only 'llama'"),
        ("llada", {"attention_layer_norm": True}, "attention_layer_norm=True"),
        ("llada", {"embedding_size": 126592}, "embedding_size=126592 .* vocab_size=126464"),
        ("llada", {"hidden_size": 4096}, "hidden_size is called d_model"),
        ("llada", {"scale_logits": True}, "scale_logits=True"),
        ("llada", {"alibi": True}, "alibi=True"),
    ],
)
def test_what_a_masked_diffusion_model_cannot_be_is_refused(
    model: str, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        parse_model_shape({**DIFFUSION[model], **change})


def test_layers_with_experts_are_those_of_the_configuration() -> None:
    shape = parse_model_shape(QWEN3_MOE)
    experts = Experts(count=128, expert_width=768, top_k=8, renormalised=True)
    assert shape.feed_forward == (experts,) * 48
    changes = {"decoder_sparse_step": 3, "mlp_only_layers": [5], "num_hidden_layers": 9}
    mixed = parse_model_shape({**QWEN3_MOE, **changes}).feed_forward
    assert [kind == experts for kind in mixed] == [i in (2, 8) for i in range(9)]
    assert mixed[0] == Dense(width=6144)


# DeepSeek-V3's 671,026,404,352 are its layers without the biases of the choice.
@pytest.mark.parametrize(
    ("model", "published"),
    [
        ("qwen3_moe", 30_532_122_624),
        ("mixtral", 46_702_792_704),
        ("deepseek_v2", 15_706_484_224),
        ("deepseek_v3", 671_026_404_352 + 58 * 256),
        ("deepseek_v32", 671_026_404_352 + 58 * 256),
        # What transformers' own model has, which leaves the predicted further tokens out as well.
        ("glm4_moe", 106_852_245_504 + 45 * 128),
    ],
)
def test_a_model_with_experts_has_as_many_parameters_as_published(
    model: str, published: int
) -> None:
    shape = parse_model_shape(EXPERTS[model])
    assert sum(map(math.prod, hf_shapes(shape).values())) == published
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(EXPERTS[model]))
    assert shape == parse_model_shape(json.loads(theirs.to_json_string()))


def test_rows_of_deepseek_v32_are_as_long_as_its_indexer_selects_all_keys() -> None:
    full, sparse = parse_model_shape(DEEPSEEK_V3), parse_model_shape(DEEPSEEK_V32)
    assert context_of(full) == (163840, "max_position_embeddings")
    assert context_of(sparse) == (2048, "index_topk")
    short = parse_model_shape({**DEEPSEEK_V32, "max_position_embeddings": 64})
    assert context_of(short) == (64, "max_position_embeddings")
    assert isinstance(sparse.attention, MultiLatentAttention)
    attention = replace(sparse.attention, index_topk=None)
    assert replace(sparse, family="deepseek_v3", attention=attention) == full


FILLED_IN_FOR_EXPERTS = {
    "glm4_moe": (
        *("attention_bias", "use_qk_norm", "partial_rotary_factor", "first_k_dense_replace"),
        *("n_group", "topk_group", "routed_scaling_factor", "n_shared_experts", "rms_norm_eps"),
        *("num_key_value_heads", "max_position_embeddings"),
    ),
    "qwen3_moe": ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "head_dim"),
    "mixtral": ("rope_theta", "rms_norm_eps", "max_position_embeddings", "num_key_value_heads"),
    "deepseek_v2": ("routed_scaling_factor", "topk_method", "first_k_dense_replace"),
    "deepseek_v3": (
        *("routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob"),
        *("first_k_dense_replace", "max_position_embeddings", "num_key_value_heads", "rope_theta"),
    ),
    "deepseek_v32": (
        *("index_topk", "index_n_heads", "max_position_embeddings", "first_k_dense_replace"),
        *("routed_scaling_factor", "n_group", "topk_group", "n_shared_experts"),
    ),
}
NEEDED_FOR_EXPERTS = {
    "glm4_moe": ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "qwen3_moe": ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "mixtral": ("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    "deepseek_v2": ("n_routed_experts", "num_experts_per_tok", "q_lora_rank", "kv_lora_rank"),
    "deepseek_v3": ("n_shared_experts", "moe_intermediate_size", "v_head_dim", "q_lora_rank"),
    "deepseek_v32": ("moe_intermediate_size", "v_head_dim", "q_lora_rank"),
}


@pytest.mark.parametrize("model", EXPERTS)
def test_a_key_of_experts_that_is_missing_has_the_value_that_transformers_takes(model: str) -> None:
    for key in FILLED_IN_FOR_EXPERTS[model]:
        config = {k: v for k, v in EXPERTS[model].items() if k != key}
        theirs = transformers.AutoConfig.for_model(**config)
        ours = parse_model_shape(config)
        assert ours == parse_model_shape(json.loads(theirs.to_json_string())), key
    for key in NEEDED_FOR_EXPERTS[model]:
        names = {key, "num_experts"} if key == "num_local_experts" else {key}
        with pytest.raises(UserError, match=key):
            parse_model_shape({k: v for k, v in EXPERTS[model].items() if k not in names})


@pytest.mark.parametrize("chosen", [1, 129])
def test_a_number_of_chosen_experts_that_is_not_supported_is_refused(chosen: int) -> None:
    with pytest.raises(UserError, match=f"num_experts_per_tok={chosen} .* 2 to num_experts=128"):
        parse_model_shape({**QWEN3_MOE, "num_experts_per_tok": chosen})


@pytest.mark.parametrize("name", MODELS)
def test_both_generations_of_transformers_say_the_same(name: str) -> None:
    old = MODELS[name]
    before = copy.deepcopy(old)
    assert parse_model_shape(as_transformers_5(old)) == parse_model_shape(old)
    assert old == before


def test_the_older_name_of_the_rope_type_is_read() -> None:
    config = {**LLAMA31, "rope_scaling": {**LLAMA3_ROPE, "type": "llama3"}}
    assert parse_model_shape(config) == parse_model_shape(LLAMA31)


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_writes_itself_is_read_alike(name: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(**copy.deepcopy(MODELS[name]))
    config.save_pretrained(tmp_path)
    shape = read_model_shape(tmp_path)
    assert shape == parse_model_shape(MODELS[name])
    with torch.device("meta"):
        layer = transformers.AutoModelForCausalLM.from_config(config).model.layers[0]
    ours = shape.attention
    assert layer.self_attn.head_dim == ours.head_dim
    assert layer.self_attn.num_key_value_groups * ours.groups == ours.heads
    assert (layer.self_attn.q_proj.bias is not None) == ours.qkv_bias
    assert hasattr(layer.self_attn, "q_norm") == ours.qk_norm


def test_a_llama_without_key_value_heads_has_one_per_head() -> None:
    config = {k: v for k, v in SMOLLM2.items() if k != "num_key_value_heads"}
    assert parse_model_shape(config).attention.groups == 9
    assert transformers.AutoConfig.for_model(**config).num_key_value_heads == 9


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **more}}


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama31", rope("linear"), "factor"),
    ("llama31", rope("linear", factor=0.5), "factor=0.5 .* 1 or more"),
    ("llama31", {"rope_scaling": {"type": "dynamic", "factor": "2"}}, "factor='2'"),
    ("llama31", rope("dynamic", factor=2.0, alpha=1000.0), "alpha"),
    ("llama31", {"rope_scaling": "linear"}, "rope_scaling='linear'"),
    ("qwen25", rope("yarn", original_max_position_embeddings=32768), "factor"),
    ("qwen25", rope("yarn", factor=4.0, attn_factor=2.0), "attn_factor"),
    ("qwen25", rope("yarn", factor=4.0, truncate=1), "truncate=1"),
    ("qwen25", rope("yarn", factor=4.0, beta_fast=0), "beta_fast=0"),
    ("qwen25", rope("yarn", factor=4.0, mscale=-1, mscale_all_dim=1.0), "mscale=-1"),
    ("qwen25", rope("yarn", factor=4.0, attention_factor=-1.0), "attention_factor"),
    ("qwen25", rope("yarn", factor=4.0, beta_fast=1, beta_slow=32), "beta_fast"),
    ("llama31", rope("llama3", **{**LLAMA3_ROPE, "high_freq_factor": 1.0}), "low_freq_factor"),
    ("qwen3", rope("longrope", short_factor=[1.0], long_factor=[2.0]), "longrope"),
    ("qwen25", {"rope_scaling": {"type": "mrope", "mrope_section": [16]}}, "mrope"),
    ("llama31", rope("llama3"), "factor"),
    ("llama31", rope("llama3", **LLAMA3_ROPE, attention_factor=2.0), "attention_factor"),
    ("smollm2", {"rope_scaling": {"factor": 8.0}}, "factor"),
    ("smollm2", rope("default", partial_rotary_factor=0.5), "partial_rotary_factor"),
    ("smollm2", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "full_attention"),
    (
        "llama31",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        "rope_parameters and rope_scaling",
    ),
    ("smollm2", {"rope_interleaved": True}, "rope_interleaved"),
    ("smollm2", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ("llama31", {"attention_bias": True}, "attention_bias"),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("llama31", {"mlp_bias": True}, "mlp_bias"),
    ("llama31", {"sliding_window": 4096}, "sliding_window"),
    ("qwen25", {"use_sliding_window": True}, "use_sliding_window"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ("llama31", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("llama31", {"attention_dropout": 0.1}, "attention_dropout"),
    ("llama31", {"pretraining_tp": 2}, "pretraining_tp"),
    ("llama31", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("llama31", {"residual_multiplier": 0.22}, "residual_multiplier"),
    ("llama31", {"embedding_multiplier": 0}, "embedding_multiplier"),
    ("llama31", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    ("mixtral", {"sliding_window": 4096}, "sliding_window"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 7}, "n_group=7"),
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("glm4_moe", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 must be at most 1"),
    ("glm4_moe", {"partial_rotary_factor": 0.01}, "cannot be rotated in pairs"),
    ("glm4_moe", rope("yarn", factor=4.0), "yarn"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
    ("deepseek_v3", {"num_key_value_heads": 64}, "num_key_value_heads=64"),
    ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    ("deepseek_v3", {"topk_group": 9}, "topk_group=9"),
    ("deepseek_v3", rope("linear", factor=4.0), "'linear' .* deepseek_v3"),
    ("deepseek_v3", {"index_topk": 2048}, "index_topk=2048"),
    ("deepseek_v32", {"index_topk": 0}, "index_topk=0"),
    ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank"),
    ("deepseek_v32", {"layer_types": ["full_attention"]}, "only 'indexed_attention'"),
    ("deepseek_v32", {"mlp_layer_types": ["sparse"] * 61}, "mlp_layer_types=.*_replace=3 times"),
    ("llama31", {"model_type": "gemma3"}, "gemma3"),
    ("llama31", {"model_type": None}, "model_type"),
    ("llama31", {"rope_theta": None}, "rope_theta"),
    ("llama31", {"num_key_value_heads": 5}, "num_attention_heads=32 .* num_key_value_heads=5"),
    ("smollm2", {"hidden_size": 577}, "hidden_size=577 .* num_attention_heads=9"),
]


@pytest.mark.parametrize(("model", "change", "named"), UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(
    model: str, change: dict[str, Any], named: str
) -> None:
    config = {**{**MODELS, **EXPERTS}[model], **change}
    with pytest.raises(ValueError, match=rf"some/config\.json: .*{named}"):
        parse_model_shape(config, "some/config.json")


@pytest.mark.parametrize("off", [None, False])
def test_an_unknown_feature_that_is_off_is_no_error(off: object) -> None:
    assert parse_model_shape({**QWEN3, "use_new_thing": off}) == parse_model_shape(QWEN3)


LEFT = {
    **{"unsloth_version": "2025.1", "unsloth_fixed": True, "_attn_implementation_autoset": True},
    **{"use_bfloat16": True, "torchscript": False, "_commit_hash": "4e20de"},
    **{"temperature": 0.7, "top_p": 0.8, "do_sample": True, "max_length": 4096, "num_beams": 1},
    **{"repetition_penalty": 1.05, "pruned_heads": {}, "bad_words_ids": [], "new_things": []},
}


@pytest.mark.parametrize("rank", [0, 1])
def test_keys_of_other_tools_are_ignored_with_one_warning(
    rank: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    for name, value in {"LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "h", "MASTER_PORT": 9}.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **LEFT}))
    for _ in range(2):
        assert read_model_shape(tmp_path) == parse_model_shape(QWEN3)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (1 if rank == 0 else 0)
    assert all(key in line for key in LEFT for line in lines)


def test_every_key_of_generation_that_transformers_takes_out_of_a_file_is_ignored() -> None:
    taken = transformers.GenerationConfig._get_default_generation_params()
    found = parse_model_shape({**QWEN3, **dict.fromkeys(taken, 3)})
    assert found == parse_model_shape(QWEN3)


@pytest.mark.parametrize(
    ("key", "value"),
    [("pruned_heads", {"0": [1]}), ("new_things", [0]), ("new_thing", 0), ("new_thing", "")],
)
def test_an_unknown_key_that_says_something_is_refused(key: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"{key}=.* is not supported by the qwen3 family"):
        parse_model_shape({**QWEN3, key: value})


NEEDED = [
    "num_attention_heads",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "vocab_size",
]


@pytest.mark.parametrize(
    ("model", "key"),
    [
        *((model, key) for model in MODELS for key in NEEDED),
        # transformers takes 32 of them, which do not divide the 28 heads.
        ("qwen25", "num_key_value_heads"),
    ],
)
def test_a_missing_key_is_named(model: str, key: str) -> None:
    config = {k: v for k, v in MODELS[model].items() if k != key}
    with pytest.raises(ValueError, match=key):
        parse_model_shape(config)


FILLED_IN = [
    *("rope_theta", "rms_norm_eps", "max_position_embeddings", "num_key_value_heads", "head_dim"),
    *("hidden_act", "tie_word_embeddings", "attention_bias", "rope_scaling", "rope_parameters"),
]


@pytest.mark.parametrize("key", FILLED_IN)
@pytest.mark.parametrize("model", MODELS)
def test_a_key_that_is_missing_has_the_value_that_transformers_takes(model: str, key: str) -> None:
    config = {k: v for k, v in MODELS[model].items() if k != key}
    if key == "num_key_value_heads" and model.startswith("qwen"):
        config |= {"num_attention_heads": 32, "hidden_size": 4096}
    theirs = transformers.AutoConfig.for_model(**config)
    ours = parse_model_shape(config)
    heads = theirs.num_attention_heads
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.norm_epsilon == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.attention.groups == theirs.num_key_value_heads
    width = getattr(theirs, "head_dim", None) or theirs.hidden_size // heads
    assert ours.attention.head_dim == width
    assert ours.tied_embeddings == theirs.tie_word_embeddings


def test_a_first_llama_has_the_frequencies_of_its_time() -> None:
    config = {k: v for k, v in LLAMA31.items() if k not in ("rope_theta", "rope_scaling")}
    assert parse_model_shape(config).rope == Rope(theta=10000.0)
    scaled = {**LLAMA3_ROPE, "rope_type": "llama3"}
    del scaled["original_max_position_embeddings"]
    theirs = transformers.AutoConfig.for_model(**{**config, "rope_scaling": {**scaled}})
    ours = parse_model_shape({**config, "rope_scaling": {**scaled}}).rope
    asked = theirs.rope_parameters["original_max_position_embeddings"]
    assert isinstance(ours.scaling, Llama3Scaling)
    assert ours.scaling.original_max_position_embeddings == asked
    assert asked == LLAMA31["max_position_embeddings"]
    assert ours.theta == theirs.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "10000", True])
def test_a_base_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="rope_theta"):
        parse_model_shape({**SMOLLM2, "rope_theta": value})


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "mystery": 1}))
    with pytest.raises(ValueError, match=rf"{tmp_path}.*mystery"):
        read_model_shape(tmp_path)


def llama3_oracle(theta: float, head_dim: int, scaling: dict[str, Any]) -> list[float]:
    """Wavelengths beyond the old context are stretched, short ones kept, the rest blended."""
    result = []
    context, low = scaling["original_max_position_embeddings"], scaling["low_freq_factor"]
    high, factor = scaling["high_freq_factor"], scaling["factor"]
    for i in range(0, head_dim, 2):
        frequency = theta ** (-i / head_dim)
        turns = context * frequency / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        result.append(share * frequency + (1 - share) * frequency / factor)
    return result


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS: dict[str, dict[str, Any]] = {
    "llama3": {**LLAMA3_ROPE, "rope_type": "llama3"},
    "llama3 of a short context": {
        **{**LLAMA3_ROPE, "factor": 32.0, "original_max_position_embeddings": 64},
        "rope_type": "llama3",
    },
    "llama3 of factor 1": {**LLAMA3_ROPE, "factor": 1.0, "rope_type": "llama3"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn of its own context": {"rope_type": "yarn", "factor": 3.0},
    "yarn of factor 1": {**YARN, "factor": 1.0},
    "yarn of a short context": {**YARN, "original_max_position_embeddings": 64},
    "yarn with an exact ramp": {**YARN, "truncate": False},
    "yarn with betas": {**YARN, "beta_fast": 16, "beta_slow": 2.0, "truncate": False},
    "yarn with equal betas": {**YARN, "beta_fast": 2, "beta_slow": 2, "truncate": False},
    "yarn with a null": {**YARN, "beta_slow": None},
    "yarn with an attention factor": {**YARN, "attention_factor": 0.7},
    "yarn with one mscale": {**YARN, "mscale": 0.7},
    "yarn with an mscale of 0": {**YARN, "mscale": 0, "mscale_all_dim": 1.3},
    "yarn with an mscale_all_dim of 0": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.0},
    "yarn with two mscales": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
}


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang"])
def test_what_an_engine_does_not_read_is_named(engine: EngineName) -> None:
    plain = {**QWEN3_MOE, "tie_word_embeddings": False}
    changes = {"tie_word_embeddings": True, "mlp_only_layers": [0], "decoder_sparse_step": 2}
    assert engine_mismatch_reason(parse_model_shape(plain), engine) is None
    for key, value in changes.items():
        found = engine_mismatch_reason(parse_model_shape({**plain, key: value}), engine)
        assert (key in found) if found else engine != "sglang"


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang"])
def test_an_engine_that_reads_no_layer_types_takes_attention_in_every_fourth_layer_alone(
    engine: EngineName,
) -> None:
    for interval in (4, 2):
        text = transformers.Qwen3_5TextConfig(num_hidden_layers=8, full_attention_interval=interval)
        config = {**text.to_dict(), "architectures": ["Qwen3_5ForCausalLM"]}
        found = engine_mismatch_reason(parse_model_shape(config), engine)
        assert ("layer_types" in str(found)) == ((engine, interval) == ("sglang", 2))
        assert found is None or engine == "sglang"


def test_an_engine_that_starts_whole_models_refuses_those_that_read_pictures() -> None:
    shape = parse_model_shape(QWEN35_397B)
    found = {name: engine_mismatch_reason(shape, name) for name in ("hf", "vllm", "sglang")}
    assert found["hf"] is found["vllm"] is None
    assert "SGLang does not read text_config alone; use vllm or hf" in str(found["sglang"])


def test_families_with_gated_delta_nets_are_known_to_the_engines() -> None:
    known = {name for name, keys in ENGINES["sglang"].unread.items() if "layer_types" in keys}
    assert known == {name for name, family in FAMILIES.items() if family.delta_net is not None}


def test_what_kernels_for_gated_delta_nets_cannot_compute_on_a_cpu_is_named() -> None:
    net = GatedDeltaNet(
        key_heads=2, value_heads=4, key_dim=64, value_dim=128, kernel=4, by_head=False
    )
    narrow = replace(net, key_dim=32)
    for dtype in ("bfloat16", "float32"):
        assert cpu_delta_net_obstacle(narrow, "hf", dtype) is None
        assert "use hf" in str(cpu_delta_net_obstacle(net, "sglang", dtype))
        assert "linear_key_head_dim=32" in str(cpu_delta_net_obstacle(narrow, "vllm", dtype))
    assert cpu_delta_net_obstacle(net, "vllm", "bfloat16") is None
    assert "not in float32; use hf" in str(cpu_delta_net_obstacle(net, "vllm", "float32"))


@pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"head_dim": 25}, r"heads of 25 numbers|even rotary dimension"),
        ({"num_key_value_heads": 2}, "num_attention_heads=9 is not a multiple of"),
    ],
)
def test_heads_that_cannot_be_computed_are_refused(
    tmp_path: Path, strategy: StrategyName, changed: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMOLLM2, **changed}))
    with pytest.raises(UserError, match=said):
        read_shape(tmp_path, strategy)
    if strategy == "fsdp":
        # A family whose configuration transformers does not check.
        keys = {"num_hidden_layers": 1, "model_type": "olmo2", "hidden_size": 576}
        (tmp_path / "config.json").write_text(json.dumps({**SMOLLM2, **keys, **changed}))
        with pytest.raises(UserError, match=said):
            read_shape(tmp_path, strategy)


def test_only_the_engine_for_it_generates_with_a_masked_diffusion_model() -> None:
    for engine in get_args(EngineName):
        for config in (DREAM, LLADA, SMOLLM2):
            obstacle = engine_mismatch_reason(parse_model_shape(config), engine)
            assert (obstacle is None) == ((engine == "diffusion") == (config is not SMOLLM2))
    assert "use diffusion" in str(engine_mismatch_reason(parse_model_shape(DREAM), "hf"))


@pytest.mark.parametrize("head_dim", [64, 128, 20])
@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("generation", [4, 5])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_rope_equals_that_of_transformers(
    head_dim: int, theta: float, generation: int, scaling: dict[str, Any]
) -> None:
    """Frequencies and attention factor, of both forms, at the model's whole context."""
    config = {**LLAMA31, "head_dim": head_dim}
    del config["rope_scaling"], config["rope_theta"]
    config |= (
        {"rope_theta": theta, "rope_scaling": scaling}
        if generation == 4
        else {"rope_parameters": {"rope_theta": theta, **scaling}}
    )
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    context = LLAMA31["max_position_embeddings"]
    init = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    want, attention = init(theirs, torch.device("cpu"), seq_len=context)
    ours = parse_model_shape(config).rope
    got = rope_frequencies(ours, head_dim)
    assert (got.dtype, got.shape) == (torch.float32, (head_dim // 2,))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(attention, rel=1e-12)


@pytest.mark.parametrize(
    ("engine", "scaling", "named"),
    [
        ("sglang", SCALINGS["dynamic"], "dynamic"),
        ("sglang", SCALINGS["yarn with an attention factor"], "attention_factor"),
        ("vllm", SCALINGS["yarn of a short context"], "lower max_position_embeddings"),
        ("vllm", {"rope_type": "linear", "factor": 8}, "write 8.0"),
        *(("hf", scaling, None) for scaling in SCALINGS.values()),
        *((engine, SCALINGS["yarn"], None) for engine in ("vllm", "sglang")),
        *((engine, SCALINGS["linear"], None) for engine in ("vllm", "sglang")),
        *((engine, SCALINGS["llama3"], None) for engine in ("vllm", "sglang")),
        ("vllm", SCALINGS["dynamic"], None),
        ("vllm", SCALINGS["yarn with an attention factor"], None),
    ],
)
def test_an_engine_that_rotates_otherwise_is_named(
    engine: EngineName, scaling: dict[str, Any], named: str | None
) -> None:
    shape = parse_model_shape({**LLAMA31, "rope_scaling": scaling})
    found = engine_rope_mismatch(shape.rope, engine, shape.max_position_embeddings)
    assert (found is None) if named is None else (found is not None and named in found)


@pytest.mark.parametrize("head_dim", [64, 128, 20])
@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("scaling", [None, LLAMA3_ROPE, {**LLAMA3_ROPE, "factor": 1.0}])
def test_frequencies_are_the_formula(
    head_dim: int, theta: float, scaling: dict[str, Any] | None
) -> None:
    rope = Rope(theta=theta, scaling=Llama3Scaling(**scaling) if scaling else None)
    got = rope_frequencies(rope, head_dim)
    config = transformers.AutoConfig.for_model(**{**SMOLLM2, "head_dim": head_dim})
    config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    if scaling is None:
        want, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    plain = llama3_oracle(theta, head_dim, scaling or {**LLAMA3_ROPE, "factor": 1.0})
    torch.testing.assert_close(got.double(), torch.tensor(plain).double(), rtol=2e-5, atol=0)
