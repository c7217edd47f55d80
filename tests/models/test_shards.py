"""The ranks that hold a shard, against a search of what every rank builds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.rope import Rope
from ctrl_megatron.models.shape import Dense, Experts, GroupedQueryAttention, ModelShape
from ctrl_megatron.models.shards import ShardParam, check_split, distinct_shards, shard_params
from ctrl_megatron.parallel.layout import Layout

EXPERTS = 6
SHAPE = ModelShape(
    family="any",
    hidden_size=6,
    attention=GroupedQueryAttention(heads=6, groups=6, head_dim=2, qkv_bias=True),
    feed_forward=(
        Dense(width=24),
        Experts(count=EXPERTS, expert_width=12, top_k=2, renormalised=True),
    )
    * 2,
    vocab_size=11,
    max_position_embeddings=8,
    norm_epsilon=1e-5,
    rope=Rope(theta=1e4),
    tied_embeddings=True,
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tensor, context, data = (draw(st.integers(1, 3)) for _ in range(3))
    stage = tensor * context * data
    expert_tensor = draw(st.sampled_from([n for n in (1, 2, 3) if stage % n == 0]))
    left = stage // expert_tensor
    return Layout(
        tensor=tensor,
        context=context,
        data=data,
        pipeline=draw(st.integers(1, 2)),
        virtual_pipeline=draw(st.integers(1, 2)),
        expert_tensor=expert_tensor,
        expert=draw(st.sampled_from([n for n in (1, 2, 3, 6) if left % n == 0])),
    )


def built(layout: Layout) -> dict[tuple[int, ShardParam], list[int]]:
    """(chunk, shard) -> the ranks that build it."""
    found: dict[tuple[int, ShardParam], list[int]] = {}
    for rank in range(layout.world_size):
        for chunk in range(layout.virtual_pipeline):
            for param in shard_params(SHAPE, layout, layout.coordinates(rank), chunk=chunk):
                found.setdefault((chunk, param), []).append(rank)
    return found


@settings(deadline=None, max_examples=40)
@given(layouts())
def test_the_holders_of_a_shard_are_the_ranks_that_build_it(layout: Layout) -> None:
    alike: dict[tuple[int, ShardParam], set[int]] = {}
    for (chunk, param), ranks in built(layout).items():
        assert layout.ranks_at(param.mesh, param.at) == tuple(ranks)
        # Two shards with the same elements would be held by more ranks than the indices say.
        content = replace(param, at=(), mesh="dense", cuts=(), copy=False)
        assert not alike.setdefault((chunk, content), set()) & set(ranks)
        alike[chunk, content].update(ranks)
        if param.pieces:
            assert alike[chunk, content] == set(ranks), param.name


@settings(deadline=None, max_examples=40)
@given(layouts())
def test_distinct_shards_are_those_of_all_ranks_once(layout: Layout) -> None:
    found = [
        (chunk, param)
        for pp, chunk in layout.virtual_stages()
        for param in distinct_shards(SHAPE, layout, pp=pp, chunk=chunk)
    ]
    assert len(set(found)) == len(found)
    assert set(found) == built(layout).keys()


@settings(deadline=None, max_examples=20)
@given(layouts())
def test_each_expert_is_whole_over_its_tensor_ranks_and_named_locally(layout: Layout) -> None:
    elements: dict[str, int] = {}
    local = EXPERTS // layout.expert
    for _, param in built(layout):
        if param.mesh == "expert":
            number = int(param.name.split("local_experts.")[1].split(".")[0])
            ep = dict(param.at)["ep"]
            for piece in param.pieces:
                expert = int(piece.hf.split("experts.")[1].split(".")[0])
                assert expert == ep * local + number
                elements[piece.hf] = elements.get(piece.hf, 0) + piece.extent[0] * piece.extent[1]
    whole = 12 * SHAPE.hidden_size
    assert elements == {
        f"model.layers.{i}.mlp.experts.{e}.{x}_proj.weight": whole
        for i in (1, 3)
        for e in range(EXPERTS)
        for x in ("gate", "up", "down")
    }


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ({"data": 4, "expert": 4}, f"experts={EXPERTS} .*expert_model_parallel_size=4"),
        (
            {"data": 5, "expert_tensor": 5},
            "moe_intermediate_size=12 .*expert_tensor_parallel_size=5",
        ),
        ({"tensor": 2}, "tensor_model_parallel_size=2 .*\n?.*sequence_parallel to true"),
    ],
)
def test_experts_that_do_not_divide_are_named(layout: dict[str, int], named: str) -> None:
    with pytest.raises(UserError, match=f"(?s){named}"):
        check_split(SHAPE, Layout(**layout))


def test_a_dense_model_has_nothing_to_spread() -> None:
    dense = replace(SHAPE, feed_forward=(Dense(width=8),) * SHAPE.num_layers)
    check_split(dense, Layout(data=2))
    for layout in (Layout(data=2, expert=2), Layout(data=2, expert_tensor=2)):
        with pytest.raises(UserError, match="no experts"):
            check_split(dense, layout)
