"""Experts read back from the tensor ranks of an engine, whose layers are stood in for here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.rollout.held_tensors import (
    Gather,
    RankExpertWeights,
    engine_hf_tensors,
    name_with_attention,
)

NAMES = ("gate_proj", "up_proj", "down_proj")
STEM = "model.layers.3.mlp.experts"
KEYS, VALUES = 8, 12


class RoutedExperts(torch.nn.Module):
    """vLLM's layer, as far as it is read."""


class LinearBase(torch.nn.Module):
    """A rank's part of a linear layer."""

    def __init__(self, weight: torch.Tensor, sizes: list[int] | None = None) -> None:
        super().__init__()
        self.input_size, self.output_sizes = weight.shape[-1], sizes
        self.weight = torch.nn.Parameter(weight)


class ColumnParallelLinear(LinearBase):
    """One part, cut by rows."""


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several parts, each cut by rows."""


class GatedDeltaNet(torch.nn.Module):
    """A rank's part of the engines' layer."""

    def __init__(self, whole: dict[str, torch.Tensor], rank: int, ranks: int) -> None:
        super().__init__()
        self.key_dim, self.value_dim = KEYS, VALUES

        def mine(tensor: torch.Tensor, *sizes: int) -> torch.Tensor:
            parts = tensor.split(sizes or len(tensor))
            return torch.cat([part.chunk(ranks)[rank] for part in parts])

        blocks = (KEYS, KEYS, VALUES)
        joined = torch.cat([whole["in_proj_qkv.weight"], whole["in_proj_z.weight"]])
        self.in_proj_qkvz = MergedColumnParallelLinear(
            mine(joined, *blocks, VALUES), [*blocks, VALUES]
        )
        self.conv1d = ColumnParallelLinear(mine(whole["conv1d.weight"], *blocks))
        for name in ("A_log", "dt_bias"):
            self.register_parameter(name, torch.nn.Parameter(mine(whole[name]).float()))


class Meeting:
    """Gathers over threads that stand for tensor ranks."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=30)
        self._given: dict[int, torch.Tensor] = {}

    def of(self, rank: int) -> Gather:
        def gather(tensor: torch.Tensor, dim: int) -> torch.Tensor:
            self._given[rank] = tensor
            self._barrier.wait()
            whole = torch.cat([self._given[r] for r in sorted(self._given)], dim)
            self._barrier.wait()
            return whole

        return gather


def full(experts: int, width: int, hidden: int) -> dict[str, torch.Tensor]:
    """Experts of which no two elements are equal, under their HF names."""
    shapes = [(width, hidden), (width, hidden), (hidden, width)]
    numbers = torch.randperm(3 * experts * width * hidden).float().split(width * hidden)
    names = [
        (e, name, shape) for e in range(experts) for name, shape in zip(NAMES, shapes, strict=True)
    ]
    return {
        f"{STEM}.{e}.{name}.weight": part.view(shape)
        for (e, name, shape), part in zip(names, numbers, strict=True)
    }


def padded(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """The tensor with NaN behind its end, so that padding cannot be read unnoticed."""
    shape = list(tensor.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([tensor, torch.full(shape, torch.nan)], dim)


def by_width(whole: dict[str, torch.Tensor], experts: int, padding: int, ranks: int) -> list[Any]:
    """What each rank holds of the width of every expert, as SGLang pads it."""
    gate, up, down = (
        torch.stack([whole[f"{STEM}.{e}.{name}.weight"] for e in range(experts)]) for name in NAMES
    )
    width = gate.shape[1]
    cuts = [
        padded(part, dim, width + padding).chunk(ranks, dim)
        for part, dim in ((gate, 1), (up, 1), (down, 2))
    ]
    return [
        RankExpertWeights(torch.cat([g, u], 1), d, width=width if padding else None)
        for g, u, d in zip(*cuts, strict=True)
    ]


def by_expert(whole: dict[str, torch.Tensor], experts: int, order: list[int], ranks: int) -> list:
    """What each rank holds of whole experts, placed in ``order``."""
    gate_up, down = (
        torch.stack(
            [torch.cat([whole[f"{STEM}.{e}.{name}.weight"] for name in names]) for e in order]
        )
        for names in (NAMES[:2], NAMES[2:])
    )
    pieces = zip(
        gate_up.chunk(ranks), down.chunk(ranks), torch.tensor(order).chunk(ranks), strict=True
    )
    return [RankExpertWeights(*piece) for piece in pieces]


def read_back(held: list[RankExpertWeights], **how: Any) -> dict[str, torch.Tensor]:
    """HF name -> tensor of these experts."""
    model = torch.nn.ModuleDict({"routed_experts": RoutedExperts()})
    for part in reversed(STEM.split(".")):
        model = torch.nn.ModuleDict({part: model})
    computed = [{"computed_experts": lambda module, own=own: own} for own in held]
    return found_by_all([(model, {"fused": {}, **how, **own}) for own in computed], torch.float32)


def found_by_all(
    ranks: list[tuple[torch.nn.Module, dict[str, Any]]], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """HF name -> tensor, which every rank must have found alike and once."""
    meeting = Meeting(len(ranks))

    def on(rank: int) -> list[tuple[str, torch.Tensor]]:
        model, how = ranks[rank]
        return list(engine_hf_tensors(model, dtype, gather=meeting.of(rank), **how))

    with ThreadPoolExecutor(len(ranks)) as pool:
        first, *others = pool.map(on, range(len(ranks)))
    found = dict(first)
    assert len(found) == len(first)
    for other in others:
        assert [name for name, _ in other] == [name for name, _ in first]
        assert all(torch.equal(found[name], tensor) for name, tensor in other)
    return found


sizes = st.integers(1, 4)


@settings(max_examples=60, deadline=None)
@given(st.data(), sizes, sizes, sizes, sizes)
def test_every_number_of_an_expert_is_read_once_however_ranks_share_it(
    data: st.DataObject, ranks: int, per_rank: int, other: int, hidden: int
) -> None:
    if data.draw(st.booleans(), "whole experts on each rank"):
        experts = ranks * per_rank
        order = data.draw(st.permutations(range(experts)))
        whole = full(experts, other, hidden)
        held = by_expert(whole, experts, list(order), ranks)
    else:
        padding = data.draw(st.integers(0, ranks * per_rank - 1))
        whole = full(other, ranks * per_rank - padding, hidden)
        held = by_width(whole, other, padding, ranks)
    found = read_back(held)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    stacks = read_back(held, stacked=True)
    each = [[whole[f"{STEM}.{e}.{name}.weight"] for name in NAMES] for e in range(len(whole) // 3)]
    assert torch.equal(
        stacks.pop(f"{STEM}.gate_up_proj"), torch.stack([torch.cat(own[:2]) for own in each])
    )
    assert torch.equal(stacks.pop(f"{STEM}.down_proj"), torch.stack([own[2] for own in each]))
    assert not stacks


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("projections", [["in_proj_qkv", "in_proj_z"], ["in_proj_qkvz"]])
def test_a_gated_delta_net_is_read_in_the_parts_that_the_files_have(
    ranks: int, projections: list[str]
) -> None:
    shapes = {
        **{"in_proj_qkv.weight": (2 * KEYS + VALUES, 5), "in_proj_z.weight": (VALUES, 5)},
        **{"conv1d.weight": (2 * KEYS + VALUES, 1, 4), "A_log": (4,), "dt_bias": (4,)},
    }
    whole = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    how = {"fused": {"in_proj_qkvz": projections}}
    found = found_by_all(
        [(GatedDeltaNet(whole, rank, ranks), how) for rank in range(ranks)], torch.bfloat16
    )
    if len(projections) == 1:
        halves = [whole.pop(f"in_proj_{part}.weight") for part in ("qkv", "z")]
        whole["in_proj_qkvz.weight"] = torch.cat(halves)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_the_names_are_the_familys() -> None:
    held = RankExpertWeights(torch.zeros(1, 4, 3), torch.zeros(1, 3, 2), names=("w1", "w3", "w2"))
    shapes = {name: tuple(tensor.shape) for name, tensor in read_back([held]).items()}
    assert shapes == {
        f"{STEM}.0.w1.weight": (2, 3),
        f"{STEM}.0.w3.weight": (2, 3),
        f"{STEM}.0.w2.weight": (3, 2),
    }


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ("model.layers.3.q_proj.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("model.layers.13.k_norm.weight", "model.layers.13.self_attn.k_norm.weight"),
        *((name, name) for name in ("model.layers.3.self_attn.o_proj.weight", "lm_head.weight")),
        ("model.layers.0.linear_attn.out_proj.weight",) * 2,
    ],
)
def test_sglangs_attention_of_qwen35_gets_the_names_of_files(own: str, named: str) -> None:
    assert name_with_attention(own) == named
