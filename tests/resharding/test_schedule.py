"""The simulated time of a push, and the pushes of large models."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import model, pushes

from ctrl_megatron.models.hf_config import parse_model_shape
from ctrl_megatron.models.shape import ModelShape
from ctrl_megatron.parallel.layout import Layout
from ctrl_megatron.resharding.plan import EngineCut, PushPlan
from ctrl_megatron.resharding.schedule import WAYS, RankBandwidths, push_steps, simulate_push

LAYERS = 40
SHAPES = Path(__file__).parents[2] / "examples/shapes"


@given(st.integers(1, 12))
def test_no_phase_begins_before_what_it_needs_has_ended(buckets: int) -> None:
    ended: set[tuple[str, int]] = set()
    met: set[tuple[str, int]] = set()
    begun: list[tuple[str, int]] = []
    for act, phase, number in push_steps(buckets):
        if act == "meet":
            # What a rank has waited for, all have.
            met = set(ended)
        elif act == "end":
            assert (phase, number) in begun
            ended.add((phase, number))
        else:
            begun.append((phase, number))
            # The memory of messages, and the bucket's memory on the ranks that receive.
            needed = {
                "fill": {("exchange", number - 3)} - met - ended | {("load", number - 3)} - met,
                "exchange": {("fill", number)} - ended,
                "load": {("exchange", number)} - met,
            }[phase]
            assert [entry for entry in needed if entry[1] >= 0] == []
    phases = ("fill", "exchange", "load")
    assert sorted(begun) == sorted((phase, n) for phase in phases for n in range(buckets))
    assert all(
        begun.index((p, n)) < begun.index((p, n + 1)) for p in phases for n in range(buckets - 1)
    )


def one_sender(hosts: tuple[int, int]) -> PushPlan:
    """All bytes go from rank 0 to rank 1."""
    shape = model(hidden=64, layers=LAYERS)
    return PushPlan(shape, Layout(), EngineCut(), ((1,),), hosts, dtype="bfloat16")


@pytest.mark.parametrize("slowest", ["network", "host"])
def test_a_push_takes_as_long_as_its_slowest_phase(slowest: str) -> None:
    plan = one_sender((0, 1) if slowest == "network" else (0, 0))
    size = plan.engine_bytes()
    speeds = RankBandwidths(**{"network": 1e9, "host": 1e9, "copy": 1e15, slowest: 1e3})
    assert simulate_push(plan, 1, speeds).seconds == pytest.approx(size / 1e3, rel=1e-6)
    copied = RankBandwidths(network=1e15, host=1e15, copy=1e3)
    one = simulate_push(plan, size, copied)
    assert one.buckets == 1
    assert one.seconds == pytest.approx(2 * size / 1e3, rel=1e-6)
    # Filling and loading overlap, once there are several buckets.
    many = simulate_push(plan, size // 12, copied)
    assert many.seconds == pytest.approx(size / 1e3, rel=3 * many.largest / size)


@settings(deadline=None, max_examples=20)
@given(pushes(host_memory=st.just(False)), st.integers(100, 100000))
def test_every_byte_is_on_one_link_and_none_is_faster_than_it(
    drawn: tuple[ModelShape, PushPlan], bucket_bytes: int
) -> None:
    _, plan = drawn
    speeds = RankBandwidths(network=5.0, host=50.0, copy=500.0)
    time = simulate_push(plan, bucket_bytes, speeds)
    assert time.seconds >= max(time.busy.values()) * (1 - 1e-9)
    assert time.seconds <= sum(time.busy.values()) * time.buckets + 1e-9
    sums = [time.load.total_and_max_bytes(way) for way in WAYS]
    assert sum(total for total, _, _ in sums) == pytest.approx(
        plan.engine_bytes() * len(plan.takers)
    )
    got = dict.fromkeys(WAYS, 0.0)
    of_rank = plan.host_of_rank
    for transfer in plan.transfers():
        for giver, taker in itertools.pairwise((transfer.giver, *transfer.takers)):
            same = of_rank[giver] == of_rank[taker]
            way = "rank" if giver == taker else "host" if same else "network"
            got[way] += transfer.num_bytes
    assert [total for total, _, _ in sums] == pytest.approx([got[way] for way in WAYS])


@pytest.mark.parametrize(
    ("name", "train", "cut", "most"),
    [
        ("qwen2.5-72b", Layout(tensor=8, pipeline=8), EngineCut(tensor=8), 1.0),
        (
            "qwen3-235b-a22b",
            Layout(tensor=4, pipeline=2, data=8, expert=8),
            EngineCut(tensor=8, spread_experts=True),
            2.0,
        ),
        pytest.param(
            *("deepseek-v3", Layout(pipeline=16, data=16, expert=16), EngineCut(tensor=32), 3.0),
            marks=pytest.mark.long,
        ),
    ],
)
def test_large_models_are_pushed_in_seconds_and_near_the_floor(
    name: str, train: Layout, cut: EngineCut, most: float
) -> None:
    shape = parse_model_shape(json.loads((SHAPES / f"{name}.json").read_text()))
    ranks = train.world_size
    takers = tuple(tuple(range(i, i + cut.tensor)) for i in range(0, ranks, cut.tensor))
    hosts = tuple(rank // 8 for rank in range(ranks))
    plan = PushPlan(shape, train, cut, takers, hosts, dtype="bfloat16")
    time = simulate_push(plan, 512 << 20, RankBandwidths())
    assert time.busy["exchange"] < time.seconds < most
    assert time.seconds < 1.35 * time.busy["exchange"]
