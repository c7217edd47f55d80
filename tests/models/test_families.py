from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from ctrl_megatron.models.delta_rule import products_per_token
from ctrl_megatron.models.families import left_out_names
from ctrl_megatron.models.flops import model_flops
from ctrl_megatron.models.hf_config import parse_model_shape
from ctrl_megatron.models.rope import Rope
from ctrl_megatron.models.rules import hf_shapes, param_rules
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory, stacked_experts
from ctrl_megatron.models.shape import Dense, GroupedQueryAttention, ModelShape
from ctrl_megatron.models.shards import ShardParam, check_split, shard_params
from ctrl_megatron.parallel.layout import Layout

DIMS = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 14,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 3,
    "n_group": 3,
    "topk_group": 2,
}
DELTA = {
    **{"num_attention_heads": 8, "head_dim": 24, "full_attention_interval": 2},
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6},
    "linear_value_head_dim": 10,
}
DELTA_EXPERTS = {
    **{**DELTA, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "shared_expert_intermediate_size": 20,
}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_5_text": (transformers.Qwen3_5TextConfig, DELTA),
    "qwen3_5_moe_text": (transformers.Qwen3_5MoeTextConfig, DELTA_EXPERTS),
    "qwen3_next": (transformers.Qwen3NextConfig, DELTA_EXPERTS),
    "llama": (transformers.LlamaConfig, {}),
    "llama_tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2_tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 10}),
    "qwen3_tied": (transformers.Qwen3Config, {"head_dim": 10, "tie_word_embeddings": True}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 5, "head_dim": 10}),
    "deepseek_v2": (transformers.DeepseekV2Config, {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": (transformers.DeepseekV3Config, {**LATENT, "q_lora_rank": 30}),
    "deepseek_v32": (
        transformers.DeepseekV32Config,
        {**LATENT, "q_lora_rank": 30, "index_n_heads": 2, "index_head_dim": 8},
    ),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        {
            **{"head_dim": 20, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 4},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 24},
        },
    ),
}
LAYOUTS = [
    Layout(tensor=tensor, pipeline=pipeline, virtual_pipeline=virtual)
    for tensor in (1, 2, 4)
    for pipeline, virtual in ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2))
]


def family(name: str) -> tuple[transformers.PreTrainedConfig, ModelShape]:
    config_class, extra = FAMILIES[name]
    config = config_class(**{**DIMS, **extra})
    return config, parse_model_shape(json.loads(config.to_json_string()))


def shards(shape: ModelShape, layout: Layout) -> Iterator[tuple[int, int, int, ShardParam]]:
    """(tp, pp, chunk, parameter) of all ranks of one model copy."""
    for pp, chunk in layout.virtual_stages():
        for tp in range(layout.tensor):
            place = layout.coordinates(layout.rank(tp=tp, pp=pp))
            for param in shard_params(shape, layout, place, chunk=chunk):
                yield tp, pp, chunk, param


@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_shapes_are_those_of_transformers_files(name: str, tmp_path: Path) -> None:
    config, shape = family(name)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    left_out = left_out_names(config.to_dict(), "config.json")
    kept = {n: tuple(tensor.shape) for n, tensor in saved.items() if not left_out.match(n)}
    assert SafetensorsDirectory(tmp_path).shapes() == kept
    # Those who published Qwen3.5 have the experts of a layer in one tensor.
    assert hf_shapes(shape) == (stacked_experts(kept) if name == "qwen3_5_moe_text" else kept)
    # An indexer has three weights, and a norm with a bias.
    assert len(saved) - len(kept) == (5 * 8 if name == "deepseek_v32" else 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_flops_are_those_that_transformers_computes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a mask that skips them, transformers multiplies every pair of a square. The counter
    does not see into fused products, so attention and experts are computed by plain ones. Gated
    delta nets, which it fills up to whole chunks, are counted in ``test_delta_rule``."""
    config, shape = family(name)
    for module in (modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe):
        monkeypatch.setattr(module, "causal_conv1d_fn", lambda u, *_, **__: u)
        rule = lambda query, key, value, **_: (value, key)  # noqa: E731
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", rule)
    plain = {f"{part}_implementation": "eager" for part in ("attn", "experts")}
    model = transformers.AutoModelForCausalLM.from_config(config, **plain)
    tokens = 7
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(tokens)[None])
    ours = model_flops(
        shape, tokens=tokens, pairs=tokens**2, projected_tokens=tokens, backward=False
    )
    # Angles are not work on weights or pairs; transformers 5.17 multiplies matrices for them. What
    # an indexer selects of so few tokens changes nothing.
    modules, others = counter.get_flop_counts().items(), ("rotary_emb", "self_attn.indexer")
    apart = sum(sum(of.values()) for name, of in modules if name.endswith(others))
    if shape.delta_net is not None:
        ours -= 2 * tokens * len(shape.delta_layers) * products_per_token(shape.delta_net)
    assert counter.get_total_flops() - apart == ours


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pieces_cover_both_sides(name: str, layout: Layout) -> None:
    _, shape = family(name)
    covered = {n: torch.zeros(size, dtype=torch.int64) for n, size in hf_shapes(shape).items()}
    for _, _, _, param in shards(shape, layout):
        own = torch.zeros(param.shape, dtype=torch.int64)
        for piece in param.pieces:
            assert own[piece.shard_slices].shape == covered[piece.hf][piece.hf_slices].shape
            assert own[piece.shard_slices].shape == piece.extent
            own[piece.shard_slices] += 1
            covered[piece.hf][piece.hf_slices] += 1
        if "embedding" in param.name or "output_layer" in param.name:
            filled = own.amin(dim=1)
            real = int(filled.sum())
            assert torch.equal(own, (torch.arange(len(own)) < real)[:, None].expand_as(own).long())
            assert len(own) - real < layout.tensor
        else:
            assert torch.all(own == 1), param.name
    copied = shape.tied_embeddings and layout.pipeline * layout.virtual_pipeline > 1
    for hf, count in covered.items():
        whole = ("norm.weight", "gate.weight", "correction_bias", "_a_proj.weight")
        whole += ("with_mqa.weight",)
        if hf.endswith(whole):
            assert torch.all(count == layout.tensor), hf
        else:
            assert torch.all(count == (2 if copied and "embed" in hf else 1)), hf


def whole_parameter(
    param: ShardParam,
    layer: int,
    hf: dict[str, torch.Tensor],
    shape: ModelShape,
    tensor: int,
    tp: int,
) -> torch.Tensor:
    """The tensors of a rank, from Megatron's own description of its layers."""
    at = f"model.layers.{layer}."
    attention = shape.attention
    if "linear_qkv" in param.name:
        assert isinstance(attention, GroupedQueryAttention)
        groups, head = attention.groups, attention.head_dim
        leaf = param.name.rsplit(".", 1)[1]
        parts = [hf[f"{at}self_attn.{p}_proj.{leaf}"] for p in "qkv"]
        by_group = [x.reshape(groups, -1, head, *x.shape[1:]) for x in parts]
        fused = torch.cat(by_group, dim=1)
        return fused.chunk(tensor)[tp].flatten(0, 2)
    if (net := shape.delta_net) is not None and layer in shape.delta_layers:
        own, linear = param.name.split("self_attention.")[-1], at + "linear_attn."
        widths = [net.key_width, net.key_width, net.value_width]
        cut = lambda x: x.chunk(tensor)[tp]  # noqa: E731
        if own == "in_proj.weight" and net.by_head:
            return torch.cat([cut(hf[f"{linear}in_proj_{x}.weight"]) for x in ("qkvz", "ba")])
        if own in ("in_proj.weight", "conv1d.weight"):
            first = "in_proj_qkv" if own == "in_proj.weight" else "conv1d"
            parts = list(hf[f"{linear}{first}.weight"].split(widths))
            if first == "in_proj_qkv":
                parts += [hf[f"{linear}in_proj_{x}.weight"] for x in "zba"]
            return torch.cat([cut(part) for part in parts])
        if own in ("dt_bias", "A_log"):
            return cut(hf[linear + own])
        if own == "norm.weight":
            return hf[linear + own]
        if own == "out_proj.weight":
            return hf[linear + own].chunk(tensor, dim=1)[tp]
    mlp = at + "mlp"
    gate, up, down = "gate_proj", "up_proj", "down_proj"
    if shape.family == "mixtral":
        mlp, gate, up, down = at + "block_sparse_moe", "w1", "w3", "w2"
    if "router" in param.name:
        leaf = "e_score_correction_bias" if "bias" in param.name else "weight"
        return hf[f"{mlp}.gate.{leaf}"]
    if "shared_experts" in param.name:
        mlp += ".shared_experts" if shape.delta_net is None else ".shared_expert"
        if "gate_weight" in param.name:
            return hf[f"{mlp}_gate.weight"]
    if "local_experts" in param.name:
        mlp += ".experts." + param.name.split("local_experts.")[1].split(".")[0]
    if f"{at}mlp.experts.down_proj" in hf and "local_experts" in param.name:
        number = int(mlp.rpartition(".")[2])
        if "linear_fc1" in param.name:
            both = hf[f"{at}mlp.experts.gate_up_proj"][number].chunk(2)
            return torch.cat([half.chunk(tensor)[tp] for half in both])[None]
        return hf[f"{at}mlp.experts.down_proj"][number].chunk(tensor, dim=1)[tp][None]
    if "linear_fc1" in param.name:
        halves = [hf[f"{mlp}.{p}.weight"].chunk(tensor)[tp] for p in (gate, up)]
        return torch.cat(halves)
    if "linear_proj" in param.name:
        return hf[at + "self_attn.o_proj.weight"].chunk(tensor, dim=1)[tp]
    if "linear_fc2" in param.name:
        return hf[f"{mlp}.{down}.weight"].chunk(tensor, dim=1)[tp]
    if "embedding" in param.name or "output_layer" in param.name:
        head_name = "model.embed_tokens.weight"
        if "output" in param.name and not shape.tied_embeddings:
            head_name = "lm_head.weight"
        share = -(-shape.vocab_size // tensor)
        padding = torch.zeros(share * tensor - shape.vocab_size, shape.hidden_size)
        return torch.cat([hf[head_name], padding.long()]).split(share)[tp]
    for own, theirs in (
        *(("linear_q_proj", "q_proj"), ("linear_q_up_proj", "q_b_proj")),
        ("linear_kv_up_proj", "kv_b_proj"),
    ):
        if own in param.name:
            return hf[f"{at}self_attn.{theirs}.weight"].chunk(tensor)[tp]
    grouped = isinstance(attention, GroupedQueryAttention)
    query_norm = "q_norm" if grouped else "q_a_layernorm"
    norms = {
        "linear_q_down_proj": at + "self_attn.q_a_proj.weight",
        "linear_kv_down_proj": at + "self_attn.kv_a_proj_with_mqa.weight",
        "kv_layernorm": at + "self_attn.kv_a_layernorm.weight",
        "input_layernorm": at + "input_layernorm.weight",
        "pre_mlp_layernorm": at + "post_attention_layernorm.weight",
        "q_layernorm": f"{at}self_attn.{query_norm}.weight",
        "k_layernorm": at + "self_attn.k_norm.weight",
        "final_layernorm": "model.norm.weight",
    }
    return hf[norms[param.name.split(".")[-2]]]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_shards_hold_what_megatron_expects(name: str, layout: Layout) -> None:
    _, shape = family(name)
    hf, next_id = {}, 1
    for hf_name, dims in hf_shapes(shape).items():
        size = torch.Size(dims)
        hf[hf_name] = torch.arange(next_id, next_id + size.numel()).view(size)
        next_id += size.numel()
    for tp, pp, chunk, param in shards(shape, layout):
        layer = 0
        if ".layers." in param.name:
            local = int(param.name.split(".layers.")[1].split(".")[0])
            layer = layout.layers(shape.num_layers, pp=pp, chunk=chunk)[local]
        shard = torch.zeros(param.shape, dtype=torch.int64)
        for piece in param.pieces:
            shard[piece.shard_slices] = hf[piece.hf][piece.hf_slices]
        want = whole_parameter(param, layer, hf, shape, layout.tensor, tp)
        assert torch.equal(shard, want), param.name


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_cut_names_the_dimension_that_is_split(name: str, layout: Layout) -> None:
    _, shape = family(name)
    alone = {
        param.name: param.shape
        for _, _, _, param in shards(shape, Layout(pipeline=layout.pipeline))
    }
    for tp, _, _, param in shards(shape, Layout(tensor=layout.tensor, pipeline=layout.pipeline)):
        whole = alone[param.name]
        want = list(whole)
        # A part of a tensor of all experts begins with 1.
        lead = int(shape.family == "qwen3_5_moe_text" and "local_experts" in param.name)
        for cut in param.cuts:
            assert cut.axis == ("etp" if ".experts." in param.name else "tp")
            want[lead + cut.dim] = -(-whole[lead + cut.dim] // layout.tensor)
        assert param.shape == tuple(want), (tp, param.name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ends_of_the_pipeline_hold_embedding_and_output(layout: Layout) -> None:
    ends = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight")
    stages = list(layout.virtual_stages())
    for name in ("qwen2", "qwen2_tied"):
        _, shape = family(name)
        for stage in stages:
            names = [
                param.name
                for param in shard_params(
                    shape, layout, layout.first_coordinates_of_stage(stage[0]), chunk=stage[1]
                )
            ]
            assert len(set(names)) == len(names)
            assert (ends[0] in names) == (stage == stages[0])
            assert (ends[1] in names) == (stage == stages[-1])
            shared = shape.tied_embeddings and stage == stages[0]
            assert ("output_layer.weight" in names) == (stage == stages[-1] and not shared)


def test_transformer_engine_fuses_the_norms_of_short_vectors() -> None:
    _, shape = family("deepseek_v3")
    place = (layout := Layout(tensor=2)).coordinates(1)
    plain, fused = (
        [param.name for param in shard_params(shape, layout, place, chunk=0, te_names=te)]
        for te in (False, True)
    )
    renamed = {a: b for a, b in zip(plain, fused, strict=True) if a != b and "layers.3." in a}
    own = "decoder.layers.3.self_attention."
    assert renamed == {
        f"{own}{x}_layernorm.weight": f"{own}linear_{x}_up_proj.layer_norm_weight"
        for x in ("q", "kv")
    }


def test_transformer_engine_renames_only_the_fused_norms() -> None:
    _, shape = family("qwen3")
    layout = Layout(tensor=2, pipeline=2)
    place = layout.coordinates(3)
    plain = list(shard_params(shape, layout, place, chunk=0))
    fused = list(shard_params(shape, layout, place, chunk=0, te_names=True))
    renamed = {}
    for ours, theirs in zip(plain, fused, strict=True):
        assert (ours.shape, ours.pieces) == (theirs.shape, theirs.pieces)
        if ours.name != theirs.name:
            renamed[ours.name] = theirs.name
    layers = range(shape.num_layers // 2)
    at = "decoder.layers."
    assert renamed == {
        f"{at}{i}.input_layernorm.weight": (f"{at}{i}.self_attention.linear_qkv.layer_norm_weight")
        for i in layers
    } | {
        f"{at}{i}.pre_mlp_layernorm.weight": f"{at}{i}.mlp.linear_fc1.layer_norm_weight"
        for i in layers
    }


@pytest.mark.parametrize(
    ("change", "tensor", "named"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 4, "num_attention_heads=6"),
        ({}, 8, "num_key_value_heads=4"),
        ({"intermediate_size": 82}, 4, "intermediate_size=82"),
    ],
)
def test_a_tensor_size_that_does_not_divide_is_named(
    change: dict[str, int], tensor: int, named: str
) -> None:
    shape = parse_model_shape({"model_type": "llama", **DIMS, **change})
    with pytest.raises(ValueError, match=f"{named} .*tensor_model_parallel_size={tensor}"):
        check_split(shape, Layout(tensor=tensor))


def test_the_heads_of_a_delta_net_divide_over_tensor_and_context_ranks() -> None:
    _, shape = family("qwen3_5_text")
    check_split(shape, Layout(tensor=2, context=2))
    words = "linear_num_key_heads=4 .*tensor_model_parallel_size x context_parallel_size=6"
    with pytest.raises(ValueError, match=words):
        check_split(shape, Layout(tensor=2, context=3))


@st.composite
def shapes_and_layouts(draw: st.DrawFn) -> tuple[ModelShape, Layout]:
    tensor, pipeline, virtual = (draw(st.integers(1, 3)) for _ in range(3))
    groups = tensor * draw(st.integers(1, 3))
    attention = GroupedQueryAttention(
        heads=groups * draw(st.integers(1, 3)),
        groups=groups,
        head_dim=2 * draw(st.integers(1, 3)),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    layers = pipeline * virtual * draw(st.integers(1, 2))
    widths = st.integers(1, 4).map(lambda share: Dense(width=tensor * share))
    shape = ModelShape(
        family="any",
        hidden_size=draw(st.integers(1, 7)),
        vocab_size=draw(st.integers(1, 11)),
        max_position_embeddings=8,
        norm_epsilon=1e-5,
        rope=Rope(theta=1e4),
        tied_embeddings=draw(st.booleans()),
        attention=attention,
        feed_forward=tuple(draw(st.lists(widths, min_size=layers, max_size=layers))),
    )
    return shape, Layout(tensor=tensor, pipeline=pipeline, virtual_pipeline=virtual)


@settings(deadline=None, max_examples=40)
@given(shapes_and_layouts())
def test_any_model_survives_the_way_there_and_back(drawn: tuple[ModelShape, Layout]) -> None:
    shape, layout = drawn
    check_split(shape, layout)
    hf = {n: torch.randn(size) for n, size in hf_shapes(shape).items()}
    back = {n: torch.full_like(t, torch.nan) for n, t in hf.items()}
    for _, _, _, param in shards(shape, layout):
        shard = torch.full(param.shape, torch.nan)
        for piece in param.pieces:
            shard[piece.shard_slices] = hf[piece.hf][piece.hf_slices]
        for piece in param.pieces:
            back[piece.hf][piece.hf_slices] = shard[piece.shard_slices]
    for name, tensor in hf.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_of_the_table_is_used_by_some_stage(name: str) -> None:
    _, shape = family(name)
    layout = Layout(pipeline=2)
    names = [param.name for _, _, _, param in shards(shape, layout)]
    local = [re.sub(r"layers\.\d+\.", "layers.{i}.", name) for name in names]
    seen = {re.sub(r"local_experts\.\d+\.", "local_experts.{e}.", name) for name in local}
    assert {rule.megatron for rule in param_rules(shape)} == seen
