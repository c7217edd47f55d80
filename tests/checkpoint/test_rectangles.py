"""Every element of a shard, however it is cut, is in the whole tensors once."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ctrl_megatron.checkpoint.sharded import state_tensors
from ctrl_megatron.models.optimizer import OwnedRange
from ctrl_megatron.models.rope import Rope
from ctrl_megatron.models.rules import hf_shapes
from ctrl_megatron.models.shape import Dense, Experts, GroupedQueryAttention, ModelShape
from ctrl_megatron.models.shards import shard_params
from ctrl_megatron.parallel.layout import Layout

SHAPE = ModelShape(
    family="qwen2",
    hidden_size=12,
    attention=GroupedQueryAttention(heads=4, groups=2, head_dim=6, qkv_bias=True),
    feed_forward=(
        Dense(width=16),
        Experts(count=4, expert_width=8, top_k=1, renormalised=True),
    ),
    vocab_size=11,
    max_position_embeddings=64,
    norm_epsilon=1e-6,
    rope=Rope(theta=1e4),
    tied_embeddings=True,
)


def stand_in(layout: Layout, rank: int, cut: Any) -> Any:
    """A model whose weights hold their elements' places in the whole, and their ranges by ``cut``.

    A rank with the same shards as others owns the elements between two cuts.
    """
    shards, owned, place = [], [], layout.coordinates(rank)
    for param in shard_params(SHAPE, layout, place, chunk=0):
        weight = torch.zeros(param.shape)
        for piece in param.pieces:
            shape = hf_shapes(SHAPE)[piece.hf]
            whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
            weight[piece.shard_slices] = whole[piece.hf_slices]
        shards.append((param, weight))
        replicas = layout.data * layout.context
        number = place.cp + layout.context * place.dp
        if param.mesh == "expert":
            replicas, number = replicas // layout.expert, place.edp
        points = [0, *sorted(cut(weight.numel()) for _ in range(replicas - 1)), weight.numel()]
        begin, end = list(itertools.pairwise(points))[number]
        if begin < end:
            part = weight.view(-1)[begin:end].clone()
            owned.append(OwnedRange(weight=weight, start=begin, tensors={"exp_avg": part}))  # type: ignore[arg-type]
    return SimpleNamespace(
        shape=SHAPE,
        onload=lambda *_: None,
        offload=lambda *_: None,
        shards_without_onload=lambda: shards,
        current_tensor=lambda tensor: tensor,
        groups=SimpleNamespace(layout=layout, place=place, rank=rank),
        options=SimpleNamespace(optimizer=SimpleNamespace(distributed=True)),
        optimization=SimpleNamespace(owned_ranges=lambda: owned),
    )


@settings(max_examples=30, deadline=None)
@given(
    tensor=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([1, 2]),
    data=st.integers(1, 4),
    context=st.integers(1, 2),
    expert=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**31),
)
def test_ranks_together_hold_each_element_once(
    tensor: int, pipeline: int, data: int, context: int, expert: int, seed: int
) -> None:
    assume(data * context % expert == 0)
    layout = Layout(tensor=tensor, pipeline=pipeline, data=data, context=context, expert=expert)
    count = {name: torch.zeros(size) for name, size in hf_shapes(SHAPE).items()}
    count |= {f"optimizer.exp_avg.{name}": torch.zeros_like(t) for name, t in count.items()}
    written = []
    for rank in range(layout.world_size):
        generator = torch.Generator().manual_seed(seed)  # the same cuts on every rank

        def cut(size: int, generator: torch.Generator = generator) -> int:
            return int(torch.randint(0, size + 1, (), generator=generator))

        written.append(0)
        model = stand_in(layout, rank, cut)
        for name, whole in state_tensors(model, saving=True).items():
            places = torch.arange(1.0, 1 + whole.shape.numel()).view(whole.shape)
            for offset, part in whole.parts.items():
                there = tuple(slice(a, a + n) for a, n in zip(offset, part.shape, strict=True))
                assert torch.equal(part, places[there]), name
                count[name][there] += 1
                written[-1] += part.numel() * (not name.startswith("optimizer"))
    assert all((times == 1).all() for times in count.values())
    # The ranks that hold the same share the writing of the weights: those with the same part of a
    # matrix, those with the same experts, and all ranks of a stage for a norm.
    largest = sum(sorted(torch.Size(size).numel() for size in hf_shapes(SHAPE).values())[-3:])
    for rank in range(layout.world_size):
        replicas = layout.ranks_at("dense", layout.coordinates(rank).indices_on("tp", "pp"))
        shares = [written[replica] for replica in replicas]
        assert max(shares) - min(shares) <= largest
