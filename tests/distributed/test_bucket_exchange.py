"""Weights in 8 bits between processes in the place of hosts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_tiny
from world import run_world

from ctrl_megatron.models.fp8 import SCALES, block_maxima, block_scales, quantise
from ctrl_megatron.rollout.weight_update import tensor_checksum


@pytest.mark.parametrize(
    ("family", "layout", "of_rank", "readers"),
    [
        # Tensor ranks cut blocks of 128, and stages are on different hosts.
        ("qwen2", {"tensor": 2, "pipeline": 2}, (0, 0, 1, 1), (0, 1)),
        # A host has half of the experts; another one reads.
        ("qwen3_moe", {"data": 3, "expert": 3}, (0, 1, 2), (2,)),
    ],
    ids=["stages", "experts"],
)
def test_weights_arrive_in_8_bits(
    family: str,
    layout: dict[str, Any],
    of_rank: tuple[int, ...],
    readers: tuple[int, ...],
    tmp_path: Path,
) -> None:
    dims = {"hidden_size": 176, "intermediate_size": 330, "num_hidden_layers": 2}
    own = {"num_experts": 6, "moe_intermediate_size": 144} if "expert" in layout else {}
    directory = save_tiny(family, tmp_path, vocab_size=96, **dims, **own)
    wanted: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        wanted[name] = tensor
        if "_proj.weight" in name:
            scales = block_scales(block_maxima(tensor, (0, 0)))
            wanted |= {name: quantise(tensor, scales, (0, 0)), name + SCALES: scales}
    found = run_world(
        "push_quantised",
        len(of_rank),
        layout=layout,
        directory=str(directory),
        of_rank=of_rank,
        readers=readers,
    )
    for source, host in itertools.product(("model", "directory"), readers):
        got = found[of_rank.index(host)][source]
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert got[name].dtype == tensor.dtype
            assert tensor_checksum(got[name]) == tensor_checksum(tensor), (source, name)
