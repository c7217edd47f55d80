from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.models.offload import ALIGNMENT
from ctrl_megatron.models.rope import Rope
from ctrl_megatron.models.rules import hf_shapes
from ctrl_megatron.models.shape import Dense, Experts, GroupedQueryAttention, ModelShape
from ctrl_megatron.models.shards import shard_params
from ctrl_megatron.parallel.layout import Layout
from ctrl_megatron.parallel.placement import EnginePlace, Placement
from ctrl_megatron.resharding.buckets import _PIECE_BYTES, ByteSpan, byte_spans, pieces
from ctrl_megatron.resharding.plan import EngineLayout, place_in_buckets, plan
from ctrl_megatron.rollout.weight_chunks import spec_bytes
from ctrl_megatron.types import TensorSpec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
engines = st.builds(
    EngineLayout,
    dtype=st.sampled_from(sorted(BYTES)),
    bucket_bytes=st.sampled_from([1, 100, 256, 1000, 4096, 1 << 20]),
)


def engines_on(hosts: Iterable[int]) -> Placement:
    """An engine of one worker on each host."""
    return Placement(
        engines=tuple(
            EnginePlace(number=number, host=host, devices=(0,)) for number, host in enumerate(hosts)
        )
    )


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelShape, Layout]:
    tensor, pipeline, virtual = (draw(st.integers(1, 3)) for _ in range(3))
    groups = tensor * draw(st.integers(1, 2))
    attention = GroupedQueryAttention(
        heads=groups * draw(st.integers(1, 3)),
        groups=groups,
        head_dim=2 * draw(st.integers(1, 2)),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    layers = pipeline * virtual * draw(st.integers(1, 2))
    context, data = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    expert = draw(st.sampled_from([n for n in range(1, 7) if context * data % n == 0]))
    dense = st.integers(1, 4).map(lambda share: Dense(width=tensor * share))
    experts = st.integers(1, 2).map(
        lambda each: Experts(
            count=expert * each, expert_width=tensor * each, top_k=1, renormalised=True
        )
    )
    shape = ModelShape(
        family="any",
        hidden_size=draw(st.integers(1, 7)),
        vocab_size=draw(st.integers(1, 11)),
        max_position_embeddings=8,
        norm_epsilon=1e-5,
        rope=Rope(theta=1e4),
        tied_embeddings=draw(st.booleans()),
        attention=attention,
        feed_forward=tuple(draw(st.lists(dense | experts, min_size=layers, max_size=layers))),
    )
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        data=data,
        context=context,
        expert=expert,
    )
    return shape, layout


Shards = dict[tuple[int, int, str], torch.Tensor]


def scatter(shape: ModelShape, layout: Layout, hf: dict[str, torch.Tensor], te: bool) -> Shards:
    """(rank, chunk, parameter) -> its shard; what belongs to no HF tensor is NaN."""
    shards: Shards = {}
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        for chunk in range(layout.virtual_pipeline):
            for param in shard_params(shape, layout, place, chunk=chunk, te_names=te):
                weight = torch.full(param.shape, torch.nan)
                for piece in param.pieces:
                    weight[piece.slices] = hf[piece.hf][piece.hf_slices]
                shards[rank, chunk, param.name] = weight
    return shards


def holders_of(shape: ModelShape, layout: Layout) -> dict[str, set[int]]:
    """HF tensor -> the ranks that have a part of it, copies left out."""
    found: dict[str, set[int]] = {}
    for rank in range(layout.world_size):
        for chunk in range(layout.virtual_pipeline):
            for param in shard_params(shape, layout, layout.coordinates(rank), chunk=chunk):
                for piece in () if param.copy else param.pieces:
                    found.setdefault(piece.hf, set()).add(rank)
    return found


@st.composite
def spreads(draw: st.DrawFn, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(every rank's host, the hosts with engines): up to four hosts, each tensor-parallel group on
    one."""
    hosts = [draw(st.integers(0, 3)) for _ in range(layout.world_size // layout.tensor)]
    of_rank = tuple(host for host in hosts for _ in range(layout.tensor))
    readers = draw(st.sets(st.sampled_from(range(4)), min_size=1))
    return of_rank, tuple(sorted(readers))


@settings(deadline=None, max_examples=100)
@given(models(), engines, st.booleans(), st.data())
def test_carrying_the_plan_out_rebuilds_every_tensor_for_every_reader(
    drawn: tuple[ModelShape, Layout], engine: EngineLayout, te_names: bool, data: st.DataObject
) -> None:
    shape, layout = drawn
    of_rank, readers = data.draw(spreads(layout))
    engine = replace(engine, placement=engines_on(readers))
    hf = {n: torch.randn(size) for n, size in hf_shapes(shape).items()}
    shards = scatter(shape, layout, hf, te_names)
    with_ranks = sorted(set(of_rank))
    plans = [plan(shape, layout, engine, te_names, of_rank, here) for here in with_ranks]
    holding = holders_of(shape, layout)
    assert [place.spec.name for place in plans[0]] == list(hf)
    for per_host in zip(*plans, strict=True):
        place = per_host[0]
        assert {replace(other, sources=()) for other in per_host} == {replace(place, sources=())}
        name = place.spec.name
        want = hf[name]
        assert place.spec.shape == tuple(want.shape)
        assert place.spec.dtype == engine.dtype
        got: dict[int, torch.Tensor] = {}
        writes: dict[int, torch.Tensor] = {}
        holders = {of_rank[rank] for rank in holding[name]}
        for host, source in (
            (h, s) for h, p in zip(with_ranks, per_host, strict=True) for s in p.sources
        ):
            assert source.piece.hf == name
            assert of_rank[source.rank] == host, "a host writes what its own ranks have"
            shard = shards[source.rank, source.chunk, source.param]
            into = got.setdefault(host, torch.full_like(want, torch.nan))
            into[source.piece.hf_slices] = shard[source.piece.slices]
            writes.setdefault(host, torch.zeros_like(want))[source.piece.hf_slices] += 1
        written = set(got)
        for route in place.routes:
            assert route[0] in written
            for giver, taker in itertools.pairwise(route):
                assert taker not in holders, "what a host holds is not sent to it"
                got[taker] = got[giver].clone()
        assert set(got) == written | set(readers)
        takers = [host for route in place.routes for host in route[1:]]
        assert sorted(takers) == sorted(set(readers) - holders)
        assert len({route[0] for route in place.routes}) == len(place.routes)
        for host in written:
            assert torch.all(writes[host] == 1), name
        for reader in readers:
            assert torch.equal(got[reader], want), name


@settings(deadline=None, max_examples=40)
@given(models(), engines)
def test_on_one_host_nothing_is_sent_and_everything_is_written_once(
    drawn: tuple[ModelShape, Layout], engine: EngineLayout
) -> None:
    shape, layout = drawn
    for place in plan(shape, layout, engine):
        assert place.routes == ()
        assert sum(prod(source.piece.extent) for source in place.sources) == prod(place.spec.shape)


@settings(deadline=None, max_examples=60)
@given(models(), engines, st.data())
def test_spans_hold_what_is_sent_and_no_tensor_that_is_not(
    drawn: tuple[ModelShape, Layout], engine: EngineLayout, data: st.DataObject
) -> None:
    shape, layout = drawn
    of_rank, readers = data.draw(spreads(layout))
    places = plan(shape, layout, replace(engine, placement=engines_on(readers)), False, of_rank)
    for bucket in range(1 + places[-1].bucket):
        inside = [p for p in places if p.bucket == bucket]
        found = byte_spans(inside)
        for place in inside:
            around = (place.offset, place.offset + spec_bytes(place.spec))
            routes = [s.route for s in found if s.start <= around[0] and around[1] <= s.stop]
            assert sorted(routes) == sorted(place.routes)
            touching = [s.route for s in found if s.start < around[1] and around[0] < s.stop]
            assert sorted(touching) == sorted(routes)
        assert len(found) <= sum(len(place.routes) for place in inside)


@given(
    st.lists(
        st.tuples(st.integers(0, 3 * _PIECE_BYTES), st.integers(1, 3 * _PIECE_BYTES)), max_size=5
    )
)
def test_pieces_are_the_spans(drawn: list[tuple[int, int]]) -> None:
    spans = [
        ByteSpan(route=(number, 9), start=start, stop=start + size)
        for number, (start, size) in enumerate(drawn)
    ]
    found = pieces(spans)
    assert all(0 < piece.stop - piece.start <= _PIECE_BYTES for piece in found)
    for span in spans:
        own = [piece for piece in found if piece.route == span.route]
        assert (own[0].start, own[-1].stop) == (span.start, span.stop)
        assert all(a.stop == b.start for a, b in itertools.pairwise(own))
    # No span waits until another one is through.
    assert {piece.route for piece in found[: len(spans)]} == {span.route for span in spans}


def test_no_host_sends_a_tensor_twice() -> None:
    """Eight hosts of which each holds one stage: every tensor runs once round."""
    layout = Layout(tensor=2, pipeline=8)
    engine = EngineLayout(dtype="float32", bucket_bytes=99, placement=engines_on(range(8)))
    shape = ModelShape(
        family="any",
        hidden_size=4,
        attention=GroupedQueryAttention(heads=2, groups=2, head_dim=2),
        feed_forward=(Dense(width=4),) * 8,
        vocab_size=8,
        max_position_embeddings=8,
        norm_epsilon=1e-5,
        rope=Rope(theta=1e4),
        tied_embeddings=False,
    )
    for place in plan(shape, layout, engine, False, tuple(rank // 2 for rank in range(16))):
        (route,) = place.routes
        assert route == tuple((route[0] + step) % 8 for step in range(8))


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


@settings(deadline=None, max_examples=40)
@given(models(), engines)
def test_buckets_of_a_plan(drawn: tuple[ModelShape, Layout], engine: EngineLayout) -> None:
    places = [(place.spec, place.bucket, place.offset) for place in plan(*drawn, engine)]
    check_buckets(places, engine.bucket_bytes)


@settings(deadline=None, max_examples=30)
@given(models(), engines)
def test_the_same_question_has_the_same_answer(
    drawn: tuple[ModelShape, Layout], engine: EngineLayout
) -> None:
    fresh = [plan.__wrapped__(*drawn, engine) for _ in range(2)]
    assert fresh[0] == fresh[1] == plan(*drawn, engine)
    assert pickle.loads(pickle.dumps(fresh[0])) == fresh[0]


@settings(deadline=None, max_examples=40)
@given(models(), engines)
def test_replicas_share_the_copying_evenly(
    drawn: tuple[ModelShape, Layout], engine: EngineLayout
) -> None:
    shape, layout = drawn
    load = [0] * layout.world_size
    sources = [source for place in plan(shape, layout, engine) for source in place.sources]
    for source in sources:
        load[source.rank] += prod(source.piece.extent)
    largest = max(prod(source.piece.extent) for source in sources)
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        replicas = layout.holders("dense", place.on("tp", "pp"))
        if layout.expert > 1:  # then ranks differ in the experts they have
            replicas = tuple(
                r
                for r in replicas
                if layout.coordinates(r).on("etp", "ep") == place.on("etp", "ep")
            )
        assert max(load[r] for r in replicas) - min(load[r] for r in replicas) <= largest


@settings(deadline=None, max_examples=30)
@given(models(), engines)
def test_tied_embeddings_and_whole_weights_are_sent_once(
    drawn: tuple[ModelShape, Layout], engine: EngineLayout
) -> None:
    shape, layout = drawn
    places = {t.spec.name: t for t in plan(shape, layout, engine)}
    assert ("lm_head.weight" in places) != shape.tied_embeddings
    for source in places["model.embed_tokens.weight"].sources:
        assert (layout.coordinates(source.rank).pp, source.chunk) == (0, 0)
        assert source.param == "embedding.word_embeddings.weight"
    for name, place in places.items():
        if name.endswith("norm.weight"):
            assert len(place.sources) == 1, name


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="int7"):
        place_in_buckets([TensorSpec(name="x", dtype="int7", shape=(1,))], 100)
