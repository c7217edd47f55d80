"""The plan of a push, against engines that fuse what they have received."""

from __future__ import annotations

import itertools
import resource
import time
from collections import defaultdict
from dataclasses import replace
from math import prod

import pytest
import torch
from fused_weights import fused
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.errors import UserError
from ctrl_megatron.models.offload import ALIGNMENT
from ctrl_megatron.models.rope import Rope
from ctrl_megatron.models.rules import hf_shapes
from ctrl_megatron.models.shape import (
    Dense,
    Experts,
    GroupedQueryAttention,
    ModelShape,
    MultiLatentAttention,
)
from ctrl_megatron.models.shards import shard_params
from ctrl_megatron.parallel.layout import Layout
from ctrl_megatron.resharding.plan import WHOLE, EngineCut, PushPlan, Transfer, place_in_buckets
from ctrl_megatron.rollout.weight_chunks import spec_bytes
from ctrl_megatron.types import TensorSpec

BOTH = st.booleans()
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
POWERS = (1, 2, 4, 8)
Weights = dict[str, torch.Tensor]


@st.composite
def pushes(
    draw: st.DrawFn, *, unit: int = 1, host_memory: st.SearchStrategy[bool] = BOTH
) -> tuple[ModelShape, PushPlan]:
    """A model whose sizes are multiples of ``unit``, and the plan of a push of it."""
    cut = EngineCut(
        tensor=draw(st.sampled_from(POWERS)),
        spread_experts=draw(st.booleans()),
        width_unit=draw(st.sampled_from((None, 1, 3, 32))),
    )
    tensor, groups = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from(POWERS))
    tensor = min(tensor, groups)
    context, data, pipeline = (draw(st.sampled_from((1, 2, 3))) for _ in range(3))
    virtual = draw(st.sampled_from((1, 2)))
    stage = tensor * context * data
    expert_tensor = draw(st.sampled_from([n for n in (1, 2, 4) if stage % n == 0]))
    left = stage // expert_tensor
    expert = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if left % n == 0]))
    both = max(tensor, cut.tensor, expert_tensor)
    dense = Dense(width=both * unit * draw(st.integers(1, 3)))
    experts = Experts(
        count=expert * cut.tensor,
        expert_width=both * unit * draw(st.integers(1, 2)),
        top_k=1,
        renormalised=True,
        correction_bias=draw(st.booleans()),
        shared_width=both * unit * draw(st.integers(0, 2)),
    )
    grouped = GroupedQueryAttention(
        heads=max(groups, cut.tensor) * draw(st.integers(1, 2)),
        groups=groups,
        head_dim=2 * unit,
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    latent = MultiLatentAttention(
        heads=grouped.heads,
        q_lora_rank=draw(st.sampled_from((None, 3 * unit))),
        kv_lora_rank=2 * unit,
        qk_nope_head_dim=unit,
        qk_rope_head_dim=2,
        v_head_dim=3 * unit,
    )
    layers = pipeline * virtual * draw(st.integers(1, 2))
    shape = ModelShape(
        family="any",
        hidden_size=unit * draw(st.integers(1, 5)),
        vocab_size=draw(st.integers(1, 150)) * unit,
        max_position_embeddings=8,
        norm_epsilon=1e-5,
        rope=Rope(theta=1e4),
        tied_embeddings=draw(st.booleans()),
        attention=draw(st.sampled_from((grouped, latent))),
        feed_forward=tuple(
            draw(st.lists(st.sampled_from([dense, experts]), min_size=layers, max_size=layers))
        ),
    )
    layout = Layout(
        tensor=tensor,
        context=context,
        data=data,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        expert=expert,
        expert_tensor=expert_tensor,
    )
    ranks = st.integers(0, layout.world_size - 1)
    per_host = draw(st.integers(1, layout.world_size))
    takers = st.tuples(*[ranks] * cut.tensor)
    plan = PushPlan(
        shape,
        layout,
        cut,
        tuple(draw(st.lists(takers, min_size=1, max_size=3))),
        tuple(rank // per_host for rank in range(layout.world_size)),
        dtype=draw(st.sampled_from(("bfloat16", "float32"))),
        te_names=draw(st.booleans()),
        host_memory=draw(host_memory),
        sent_whole=draw(st.sampled_from((0, 1 << 20))),
    )
    return shape, plan


@settings(deadline=None, max_examples=50)
@given(pushes())
def test_every_worker_gets_each_of_its_bytes_once_and_no_other(
    drawn: tuple[ModelShape, PushPlan],
) -> None:
    shape, plan = drawn
    hf = {name: torch.randn(size) for name, size in hf_shapes(shape).items()}
    shards = Weights()
    names = {transfer.giver for transfer in plan.transfers()}
    te = any("layer_norm_weight" in r.param for t in plan.transfers() for r in t.rectangles)
    for rank in names:
        place = plan.train.coordinates(rank)
        for chunk in range(plan.train.virtual_pipeline):
            for param in shard_params(shape, plan.train, place, chunk=chunk, te_names=te):
                weight = torch.full(param.shape, torch.nan)
                for piece in param.pieces:
                    weight[piece.shard_slices] = hf[piece.hf][piece.hf_slices]
                shards[f"{rank} {chunk} {param.name}"] = weight
    got = {
        (engine, worker): {name: torch.full_like(whole, torch.nan) for name, whole in hf.items()}
        for engine in range(len(plan.takers))
        for worker in range(plan.cut.tensor)
    }
    written, sent = 0, 0
    for transfer in plan.transfers():
        engines = transfer.engines
        assert transfer.takers == tuple(plan.takers[e][transfer.worker] for e in engines)
        for engine, rectangle in itertools.product(engines, transfer.rectangles):
            piece = rectangle.piece
            into = got[engine, transfer.worker][piece.hf][piece.hf_slices]
            assert torch.isnan(into).all(), f"{piece} is written twice"
            shard = shards[f"{transfer.giver} {transfer.part.chunk} {rectangle.param}"]
            into.copy_(shard[piece.shard_slices])
            written += prod(piece.extent)
            sent += rectangle.num_bytes
    needed = 0
    for (_, worker), wholes in got.items():
        want = fused(shape, plan.cut, worker, hf)
        held = fused(shape, plan.cut, worker, wholes)
        assert want.keys() == held.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in want.items())
        needed += sum(tensor.numel() for tensor in want.values())
    # So nothing was sent that an engine does not compute with.
    assert written == needed
    assert sent == plan.engine_bytes() * len(plan.takers)


@settings(deadline=None, max_examples=15)
@given(pushes())
def test_every_rank_plans_its_own_part_of_the_same_push(
    drawn: tuple[ModelShape, PushPlan],
) -> None:
    _, plan = drawn
    everything = list(plan.transfers())
    for rank in range(plan.train.world_size):
        own = [t for t in everything if rank in (t.giver, *t.takers)]
        assert list(plan.transfers(rank)) == own


def between_hosts(plan: PushPlan) -> list[Transfer]:
    of_rank = plan.host_of_rank
    return [t for t in plan.transfers() if of_rank[t.giver] != of_rank[t.takers[0]]]


def uneven(plan: PushPlan) -> list[tuple[float, float, float]]:
    """(bytes that a rank sends to other hosts, the mean of the ranks with the same shards, bytes of
    a row of each of its transfers) of every rank. Rows are not divided."""
    load, rows = [0] * plan.train.world_size, [0] * plan.train.world_size
    for transfer in between_hosts(plan):
        load[transfer.giver] += transfer.num_bytes
        rows[transfer.giver] += max(r.num_bytes // r.piece.extent[0] for r in transfer.rectangles)
    alike = defaultdict[object, list[int]](list)
    experts = any(flow.mesh == "expert" for part in plan.parts for flow in plan.flows(part))
    for rank in range(plan.train.world_size):
        place = plan.train.coordinates(rank)
        alike[place.indices_on("tp", "pp", *(("etp", "ep") if experts else ()))].append(rank)
    means = {r: sum(load[o] for o in own) / len(own) for own in alike.values() for r in own}
    return [(load[rank], mean, rows[rank]) for rank, mean in means.items()]


@settings(deadline=None, max_examples=40)
@given(pushes(unit=64))
def test_replicas_send_equally_much(drawn: tuple[ModelShape, PushPlan]) -> None:
    shape, drawn_plan = drawn
    plan = PushPlan(
        shape,
        drawn_plan.train,
        drawn_plan.cut,
        drawn_plan.takers,
        drawn_plan.host_of_rank,
        dtype="bfloat16",
        sent_whole=0,
    )
    assert all(sent <= 1.1 * mean + rows for sent, mean, rows in uneven(plan))


def test_replicas_of_a_large_model_send_equally_much() -> None:
    """Two engines on hosts of their own take a 7B model from three copies."""
    shape = model(hidden=4096, layers=4)
    hosts = (*(rank // 4 for rank in range(24)), 9, 9, 9, 9)
    takers = ((24, 25), (26, 27))
    layout = Layout(tensor=4, pipeline=2, data=3)
    plan = PushPlan(shape, layout, EngineCut(tensor=2), takers, hosts, dtype="bfloat16")
    found = uneven(plan)
    assert all(mean > 0 and sent <= 1.1 * mean for sent, mean, _ in found)


def test_a_rank_sends_to_itself_and_its_host_before_others() -> None:
    layout, size = Layout(data=4), 2
    shape = model(hidden=64, layers=2)
    plan = PushPlan(
        shape, layout, EngineCut(tensor=size), ((0, 1), (2, 3)), (0, 0, 1, 1), dtype="bfloat16"
    )
    assert all((t.giver,) == t.takers for t in plan.transfers())
    elsewhere = PushPlan(
        shape, layout, EngineCut(), ((4,),), (0, 0, 1, 1, 1), dtype="bfloat16", sent_whole=0
    )
    assert {t.giver for t in elsewhere.transfers()} == {2, 3}
    assert between_hosts(elsewhere) == []


def model(*, hidden: int, layers: int, kind: Dense | Experts | None = None) -> ModelShape:
    return ModelShape(
        family="any",
        hidden_size=hidden,
        vocab_size=1000,
        max_position_embeddings=8,
        norm_epsilon=1e-5,
        rope=Rope(theta=1e4),
        tied_embeddings=False,
        attention=GroupedQueryAttention(heads=hidden // 16, groups=4, head_dim=16),
        feed_forward=(kind or Dense(width=4 * hidden),) * layers,
    )


def test_no_host_sends_a_byte_twice() -> None:
    """Eight hosts of two ranks, of which each holds one stage: every byte runs once round."""
    takers, hosts = tuple((2 * host,) for host in range(8)), tuple(rank // 2 for rank in range(16))
    shape, layout = model(hidden=64, layers=8), Layout(tensor=2, pipeline=8)
    plan = PushPlan(
        shape, layout, WHOLE, takers, hosts, dtype="bfloat16", host_memory=True, sent_whole=0
    )
    for transfer in between_hosts(plan):
        line = [hosts[rank] for rank in (transfer.giver, *transfer.takers)]
        assert line == [(line[0] + step) % 8 for step in range(8)]
    # Two copies on a host each share what the third host gets.
    copies = PushPlan(
        shape,
        Layout(data=2),
        WHOLE,
        ((0,), (1,), (2,)),
        (0, 1, 2),
        dtype="bfloat16",
        host_memory=True,
        sent_whole=0,
    )
    sizes = [sum(t.num_bytes for t in between_hosts(copies) if t.giver == rank) for rank in (0, 1)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def test_the_ranks_of_a_host_share_the_copying() -> None:
    plan = PushPlan(
        model(hidden=256, layers=4),
        Layout(tensor=2, data=4),
        WHOLE,
        ((0,),),
        (0,) * 8,
        dtype="bfloat16",
        host_memory=True,
        sent_whole=0,
    )
    copied = [0] * 8
    for transfer in plan.transfers():
        assert transfer.takers == (0,)
        copied[transfer.giver] += transfer.num_bytes
    assert sum(copied) == plan.engine_bytes()
    assert min(copied) == pytest.approx(max(copied), rel=0.02)


def test_stages_take_turns() -> None:
    plan = PushPlan(
        model(hidden=64, layers=8),
        Layout(pipeline=4),
        EngineCut(),
        ((0,),),
        (0,) * 4,
        dtype="bfloat16",
    )
    layers = [part.layer for part in plan.parts if part.pattern >= 0]
    assert list(dict.fromkeys(layers)) == [2, 4, 6, 0, 3, 5, 7, 1]
    first = [part for part in plan.parts if part.layer in (2, 4, 6)]
    assert [part.pp for part in first[:6]] == [1, 2, 3] * 2


@settings(deadline=None, max_examples=30)
@given(pushes(), st.integers(1, 5000))
def test_buckets_are_the_parts_in_order_and_bounded(
    drawn: tuple[ModelShape, PushPlan], bucket_bytes: int
) -> None:
    _, plan = drawn
    buckets = plan.buckets(bucket_bytes)
    assert tuple(part for bucket in buckets for part in bucket) == plan.parts
    for bucket in buckets:
        got = [0] * plan.cut.tensor
        for part in bucket:
            for flow in plan.flows(part):
                got[flow.worker] += flow.num_bytes
        assert len(bucket) == 1 or max(got) <= bucket_bytes


@pytest.mark.parametrize("tensor", [3, 6])
def test_what_no_engine_can_split_is_refused(tensor: int) -> None:
    with pytest.raises(UserError, match=r"tensor_model_parallel_size .* do not divide over"):
        PushPlan(
            model(hidden=64, layers=1),
            Layout(),
            EngineCut(tensor=tensor),
            ((0,) * tensor,),
            (0,),
            dtype="bfloat16",
        )


def test_a_rank_of_4096_plans_within_five_seconds_and_500_mb() -> None:
    """DeepSeek-V3's experts on 16 stages of 64 expert ranks, into 128 engines of 32 workers."""
    experts = Experts(count=256, expert_width=2048, top_k=8, renormalised=True)
    shape = replace(model(hidden=7168, layers=64, kind=experts), vocab_size=129280)
    ranks, size = 4096, 32
    takers = tuple(tuple(range(i, i + size)) for i in range(0, ranks, size))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    plan = PushPlan(
        shape,
        Layout(pipeline=16, data=256, expert=64),
        EngineCut(tensor=size),
        takers,
        tuple(rank // 8 for rank in range(ranks)),
        dtype="bfloat16",
    )
    got = sum(t.num_bytes for t in plan.transfers(2051) if t.takers == (2051,))
    assert time.process_time() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024
    assert got == pytest.approx(plan.engine_bytes() / size, rel=0.001)


def check_buckets(places: list[tuple[TensorSpec, int, int]], bucket_bytes: int) -> None:
    """Aligned, disjoint, in order, and bounded where more than one tensor shares a bucket."""
    inside: dict[int, list[tuple[int, int]]] = defaultdict(list)
    buckets = [bucket for _, bucket, _ in places]
    assert buckets == sorted(buckets)
    assert set(buckets) == set(range(buckets[-1] + 1))
    for spec, bucket, offset in places:
        assert offset % ALIGNMENT == 0
        size = prod(spec.shape) * BYTES[spec.dtype]
        assert spec_bytes(spec) == size
        inside[bucket].append((offset, offset + size))
    for held in inside.values():
        assert held[0][0] == 0
        for (_, end), (start, _) in itertools.pairwise(held):
            assert start >= end
        assert len(held) == 1 or held[-1][1] <= bucket_bytes


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 20), max_size=3), st.sampled_from(sorted(BYTES))),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 3000),
)
def test_places_in_buckets(tensors: list[tuple[list[int], str]], bucket_bytes: int) -> None:
    specs = [
        TensorSpec(name=f"t{i}", dtype=dtype, shape=tuple(shape))
        for i, (shape, dtype) in enumerate(tensors)
    ]
    places = place_in_buckets(specs, bucket_bytes)
    assert [p.spec for p in places] == specs
    check_buckets([(p.spec, p.bucket, p.offset) for p in places], bucket_bytes)
    # A bucket is left only when the next tensor does not fit.
    for before, after in itertools.pairwise(places):
        if after.bucket > before.bucket:
            start = -(-(before.offset + spec_bytes(before.spec)) // ALIGNMENT) * ALIGNMENT
            assert start + -(-spec_bytes(after.spec) // ALIGNMENT) * ALIGNMENT > bucket_bytes


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="int7"):
        place_in_buckets([TensorSpec(name="x", dtype="int7", shape=(1,))], 100)
