"""Weights in 8 bits: their form, and that it does not depend on the parts they are made from."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ctrl_megatron.models.fp8 import (
    BLOCK,
    FP8,
    SCALES,
    block_maxima,
    block_scales,
    dequantise,
    misaligned_part_widths,
    quantise,
    quantised_specs,
    quantization_config,
    update_block_maxima,
)
from ctrl_megatron.models.hf_config import parse_model_shape
from ctrl_megatron.models.safetensors_dir import SafetensorsDirectory
from ctrl_megatron.models.shape import ModelShape
from ctrl_megatron.types import TensorSpec

E4M3 = torch.tensor(
    [
        (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
        for exponent, mantissa in itertools.product(range(16), range(8))
    ][:-1]
)
"""The magnitudes of e4m3 by their seven bits; the last pattern is no number."""


def by_hand(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes, scales) of ``weight``, block by block: the largest magnitude becomes 448, and every
    number the nearest one of ``E4M3``, of two equally near ones the even pattern."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales, patterns = torch.ones(rows, columns), torch.zeros(weight.shape, dtype=torch.uint8)
    for row, column in itertools.product(range(rows), range(columns)):
        where = (slice(128 * row, 128 * (row + 1)), slice(128 * column, 128 * (column + 1)))
        block = weight[where]
        if block.abs().max() > 0:
            scales[row, column] = block.abs().max() / 448
        scaled = block / scales[row, column]
        gaps = (scaled.abs()[..., None] - E4M3).abs()
        nearest = gaps.argmin(dim=-1)
        above = (nearest + 1).clamp(max=len(E4M3) - 1)
        tied = (gaps.gather(-1, above[..., None]) == gaps.gather(-1, nearest[..., None]))[..., 0]
        nearest = torch.where(tied & (nearest % 2 == 1), above, nearest)
        patterns[where] = (nearest + 128 * torch.signbit(scaled)).to(torch.uint8)
    return patterns, scales


def whole(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = block_scales(block_maxima(weight, (0, 0)))
    return quantise(weight, scales, (0, 0)), scales


@pytest.mark.parametrize("size", [(128, 128), (130, 300), (7, 129)])
def test_bytes_are_those_of_the_format(size: tuple[int, int]) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(1))
    weight *= torch.logspace(-6, 6, size[1])  # subnormal numbers too
    weight[:, 128:256] = 0
    found, scales = whole(weight)
    patterns, expected = by_hand(weight)
    assert found.dtype is torch.float8_e4m3fn and torch.equal(scales, expected)
    assert torch.equal(found.view(torch.uint8), patterns)
    back = dequantise(found, scales, (0, 0), BLOCK)
    large = (
        weight.abs()
        > scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: size[0], : size[1]] * 2.0**-6
    )
    assert ((back - weight).abs() <= weight.abs() * 2.0**-4)[large].all()


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 300), st.integers(1, 300))
def test_parts_have_the_bytes_of_the_whole(data: st.DataObject, rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    cuts = [
        sorted({0, size, *data.draw(st.lists(st.integers(1, size), max_size=3))})
        for size in (rows, columns)
    ]
    parts = [
        ((top, left), weight[top:bottom, left:right])
        for (top, bottom), (left, right) in itertools.product(
            itertools.pairwise(cuts[0]), itertools.pairwise(cuts[1])
        )
    ]
    expected, wanted = whole(weight)
    largest = torch.zeros(wanted.shape)
    for start, part in parts:
        update_block_maxima(largest, block_maxima(part, start), start)
    scales = block_scales(largest)
    assert torch.equal(scales, wanted)
    for (top, left), part in parts:
        own = quantise(part, scales, (top, left)).view(torch.uint8)
        there = expected[top : top + part.shape[0], left : left + part.shape[1]]
        assert torch.equal(own, there.view(torch.uint8))


def test_linear_layers_alone_are_quantised() -> None:
    layer = "model.layers.3."
    linear = [
        *(f"{layer}self_attn.{x}.weight" for x in ("q_proj", "o_proj", "kv_a_proj_with_mqa")),
        *(f"{layer}mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        f"{layer}mlp.experts.7.gate_proj.weight",
        f"{layer}block_sparse_moe.experts.7.w2.weight",
        f"{layer}mlp.shared_experts.up_proj.weight",
    ]
    kept = [
        "model.embed_tokens.weight",
        "lm_head.weight",
        f"{layer}mlp.gate.weight",
        f"{layer}block_sparse_moe.gate.weight",
    ]
    vectors = [f"{layer}input_layernorm.weight", f"{layer}self_attn.q_proj.bias"]
    specs = [TensorSpec(name=n, dtype="bfloat16", shape=(257, 128)) for n in linear + kept]
    specs += [TensorSpec(name=n, dtype="bfloat16", shape=(257,)) for n in vectors]
    found = {spec.name: spec for spec in quantised_specs(specs)}
    for name in linear:
        assert found.pop(name).dtype == FP8
        scales = found.pop(name + SCALES)
        assert (scales.dtype, scales.shape) == ("float32", (3, 1))
    assert [spec for spec in specs if spec.name not in linear] == list(found.values())


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    found, scales = whole(torch.randn(200, 150, generator=torch.Generator().manual_seed(2)))
    save_file({name: found, name + SCALES: scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": quantization_config()})
    )
    read = SafetensorsDirectory(tmp_path).read(name)
    assert torch.equal(read, dequantise(found, scales, (0, 0), BLOCK))


def shape_of(**changes: Any) -> ModelShape:
    config = {
        **{"model_type": "llama", "vocab_size": 96, "num_hidden_layers": 2, "head_dim": 64},
        **{"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3},
        **{"intermediate_size": 1536, "rms_norm_eps": 1e-5, "max_position_embeddings": 64},
    }
    return parse_model_shape({**config, **changes}, "config.json")


def test_widths_that_end_within_a_block_are_found() -> None:
    # SmolLM2-135M.
    assert misaligned_part_widths(shape_of(), 1, whole_experts=False) == {
        "queries": 576,
        "keys": 192,
    }
    eight = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    assert misaligned_part_widths(shape_of(**eight), 4, whole_experts=False) == {}
    # More workers than key heads: each has a whole one.
    assert misaligned_part_widths(shape_of(**eight), 16, whole_experts=False) == {
        "feed-forward layers": 96
    }
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    moe = shape_of(**eight, **experts, moe_intermediate_size=128)
    assert misaligned_part_widths(moe, 2, whole_experts=False) == {"experts": 64}
    assert misaligned_part_widths(moe, 2, whole_experts=True) == {}
