"""Experts read back from the tensor ranks of an engine, whose layers are stood in for here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.rollout.held_tensors import Gather, RankExpertWeights, engine_hf_tensors

NAMES = ("gate_proj", "up_proj", "down_proj")
STEM = "model.layers.3.mlp.experts"


class RoutedExperts(torch.nn.Module):
    """vLLM's layer, as far as it is read."""


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


def read_back(held: list[RankExpertWeights]) -> dict[str, torch.Tensor]:
    """HF name -> tensor, which every rank must have found alike and once."""
    meeting = Meeting(len(held))
    model = torch.nn.ModuleDict({"routed_experts": RoutedExperts()})
    for part in reversed(STEM.split(".")):
        model = torch.nn.ModuleDict({part: model})

    def on(rank: int) -> list[tuple[str, torch.Tensor]]:
        return list(
            engine_hf_tensors(
                model,
                torch.float32,
                gather=meeting.of(rank),
                fused={},
                computed_experts=lambda module: held[rank],
            )
        )

    with ThreadPoolExecutor(len(held)) as pool:
        first, *others = pool.map(on, range(len(held)))
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


def test_the_names_are_the_familys() -> None:
    held = RankExpertWeights(torch.zeros(1, 4, 3), torch.zeros(1, 3, 2), names=("w1", "w3", "w2"))
    shapes = {name: tuple(tensor.shape) for name, tensor in read_back([held]).items()}
    assert shapes == {
        f"{STEM}.0.w1.weight": (2, 3),
        f"{STEM}.0.w3.weight": (2, 3),
        f"{STEM}.0.w2.weight": (3, 2),
    }
