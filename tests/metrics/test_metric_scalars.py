"""Merging partial results over ranks gives what one rank would have computed from everything."""

from __future__ import annotations

import math
import pickle
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.metrics import MetricBag, merge, reduce

numbers = st.floats(-1e6, 1e6)
weights = st.floats(1e-3, 1e3)
observations = st.lists(st.tuples(numbers, weights), min_size=1, max_size=12)
REDUCTIONS = ("mean", "sum", "max", "min")


def bag(values: list[tuple[float, float]]) -> MetricBag:
    """Every observation under every reduction, as one rank would add them."""
    filled = MetricBag()
    for value, weight in values:
        for name in REDUCTIONS:
            filled.add(name, value, weight, name)  # type: ignore[arg-type]
    return filled


@given(ranks=st.lists(observations, min_size=1, max_size=5))
def test_merged_ranks_equal_the_plain_definition(ranks: list[list[tuple[float, float]]]) -> None:
    everything = [pair for rank in ranks for pair in rank]
    values = [v for v, _ in everything]
    merged = reduce(merge([bag(rank).state() for rank in ranks]))
    assert merged["max"] == max(values)
    assert merged["min"] == min(values)
    assert merged["sum"] == pytest.approx(sum(values), rel=1e-9, abs=1e-6)
    expected = statistics.fmean(values, [w for _, w in everything])
    assert merged["mean"] == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(ranks=st.lists(observations, min_size=1, max_size=5), data=st.data())
def test_the_order_of_the_ranks_does_not_change_a_single_bit(
    ranks: list[list[tuple[float, float]]], data: st.DataObject
) -> None:
    states = [bag(rank).state() for rank in ranks]
    for number, (rank, state) in enumerate(zip(ranks, states, strict=True)):
        last = MetricBag()
        for value, _ in rank:
            last.add("last", value + number, reduction="last")
        state.update(last.state())
    assert merge(data.draw(st.permutations(states))) == merge(states)


@given(ranks=st.lists(observations, min_size=2, max_size=5))
def test_merging_in_two_stages_is_merging_once(ranks: list[list[tuple[float, float]]]) -> None:
    states = [bag(rank).state() for rank in ranks]
    staged = reduce(merge([merge(states[:1]), merge(states[1:])]))
    assert staged == pytest.approx(reduce(merge(states)), rel=1e-12, abs=1e-9)


def test_a_mean_is_weighted_by_what_it_counts() -> None:
    first, second = MetricBag(), MetricBag()
    first.add("loss", 1.0, weight=30)
    second.add("loss", 4.0, weight=10)
    assert reduce(merge([first.state(), second.state()])) == {"loss": 1.75}


def test_last_keeps_the_order_within_a_rank_and_the_busiest_rank_between() -> None:
    first, second = MetricBag(), MetricBag()
    for value in (3.0, 1.0):
        first.add("lr", value, reduction="last")
    second.add("lr", 9.0, reduction="last")
    assert first.result() == {"lr": 1.0}
    assert reduce(merge([second.state(), first.state()])) == {"lr": 1.0}


def test_nothing_counted_is_absent_not_zero() -> None:
    empty = MetricBag()
    empty.add("pass_rate/after", 0.0, weight=0)
    assert empty.result() == {}
    assert reduce(merge([])) == {}


def test_names_that_only_some_ranks_know_survive() -> None:
    first, second = MetricBag(), MetricBag()
    first.update({"b": 1.0, "a": 2.0})
    second.add("c", 3.0, reduction="max")
    assert list(reduce(merge([first.state(), second.state()])).items()) == [
        ("a", 2.0),
        ("b", 1.0),
        ("c", 3.0),
    ]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nan_is_never_hidden(reduction: str) -> None:
    for order in ([math.nan, 1.0], [1.0, math.nan]):
        filled = MetricBag()
        for value in order:
            filled.add("x", value, reduction=reduction)  # type: ignore[arg-type]
        assert math.isnan(filled.result()["x"])


def test_infinities_and_overflow_do_not_raise() -> None:
    filled = MetricBag()
    for value in (math.inf, -math.inf):
        filled.add("sum", value, reduction="sum")
    assert math.isnan(filled.result()["sum"])
    for _ in range(2):
        filled.add("big", 1.7e308, reduction="sum")
    assert filled.result()["big"] == math.inf


def test_misuse_is_an_error_with_the_name() -> None:
    filled = MetricBag()
    filled.add("x", 1.0)
    with pytest.raises(ValueError, match=r"'x' is added as max and as mean"):
        filled.add("x", 1.0, reduction="max")
    with pytest.raises(ValueError, match=r"'y'.*weight -1"):
        filled.add("y", 1.0, weight=-1)
    with pytest.raises(ValueError, match=r"'y'.*must be one of mean"):
        filled.add("y", 1.0, reduction="median")  # type: ignore[arg-type]


def test_states_travel_between_processes() -> None:
    state = bag([(1.0, 2.0)]).state()
    assert pickle.loads(pickle.dumps(state)) == state
