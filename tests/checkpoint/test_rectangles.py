"""Every element of a shard, however it is cut, is in the whole tensors once."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.checkpoint.sharded import tensors_of
from ctrl_megatron.models.optimizer import OwnedRange
from ctrl_megatron.models.rope import Rope
from ctrl_megatron.models.rules import hf_shapes
from ctrl_megatron.models.shape import Dense, GroupedQueryAttention, ModelShape
from ctrl_megatron.models.shards import shard_params
from ctrl_megatron.parallel.layout import Layout

SHAPE = ModelShape(
    family="qwen2",
    hidden_size=12,
    attention=GroupedQueryAttention(heads=4, groups=2, head_dim=6, qkv_bias=True),
    feed_forward=(Dense(width=16),) * 2,
    vocab_size=11,
    max_position_embeddings=64,
    norm_epsilon=1e-6,
    rope=Rope(theta=1e4),
    tied_embeddings=True,
)


def stand_in(layout: Layout, place: Any, cut: Any) -> Any:
    """A model whose weights hold their elements' places in the whole, and their ranges by ``cut``.

    Data-parallel rank ``dp`` owns the elements between the cuts before and after it.
    """
    shards, owned = [], []
    for param in shard_params(SHAPE, layout, tp=place.tp, pp=place.pp, chunk=0):
        weight = torch.zeros(param.shape)
        for piece in param.pieces:
            shape = hf_shapes(SHAPE)[piece.hf]
            whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
            weight[piece.slices] = whole[piece.hf_slices]
        shards.append((param, weight))
        points = [0, *sorted(cut(weight.numel()) for _ in range(layout.data - 1)), weight.numel()]
        begin, end = list(itertools.pairwise(points))[place.dp]
        if begin < end:
            part = weight.view(-1)[begin:end].clone()
            owned.append(OwnedRange(weight=weight, start=begin, tensors={"exp_avg": part}))  # type: ignore[arg-type]
    return SimpleNamespace(
        shape=SHAPE,
        onload=lambda *_: None,
        offload=lambda *_: None,
        places=lambda: shards,
        where_it_is=lambda tensor: tensor,
        groups=SimpleNamespace(layout=layout, place=place),
        options=SimpleNamespace(optimizer=SimpleNamespace(distributed=True)),
        optimization=SimpleNamespace(owned=lambda: owned),
    )


@settings(max_examples=30, deadline=None)
@given(
    tensor=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([1, 2]),
    data=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_ranks_together_hold_each_element_once(
    tensor: int, pipeline: int, data: int, seed: int
) -> None:
    layout = Layout(tensor=tensor, pipeline=pipeline, data=data)
    count = {name: torch.zeros(size) for name, size in hf_shapes(SHAPE).items()}
    count |= {f"optimizer.exp_avg.{name}": torch.zeros_like(t) for name, t in count.items()}
    written = []
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        generator = torch.Generator().manual_seed(seed)  # the same cuts on every rank

        def cut(size: int, generator: torch.Generator = generator) -> int:
            return int(torch.randint(0, size + 1, (), generator=generator))

        written.append(0)
        model = stand_in(layout, place, cut)
        for name, whole in tensors_of(model, saving=True).items():
            places = torch.arange(1.0, 1 + whole.shape.numel()).view(whole.shape)
            for offset, part in whole.parts.items():
                there = tuple(slice(a, a + n) for a, n in zip(offset, part.shape, strict=True))
                assert torch.equal(part, places[there]), name
                count[name][there] += 1
                written[-1] += part.numel() * (not name.startswith("optimizer"))
    assert all((times == 1).all() for times in count.values())
    # The replicas share the writing of the weights.
    largest = max(torch.Size(size).numel() for size in hf_shapes(SHAPE).values())
    for pp, tp in itertools.product(range(pipeline), range(tensor)):
        shares = [written[layout.rank(tp=tp, pp=pp, dp=dp)] for dp in range(data)]
        assert max(shares) - min(shares) <= largest
