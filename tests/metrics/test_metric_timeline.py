"""Intervals against brute force, and a timeline that several threads write."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.metrics import Phase, Timeline, overlapped_host_seconds, seconds_by_name
from ctrl_megatron.metrics.timeline import (
    Interval,
    interval_intersection,
    interval_union,
    timeline_record,
)

ticks = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda t: (t[0], t[0] + t[1]))
intervals = st.lists(ticks, max_size=6)


def covered(spans: list[tuple[int, int]]) -> set[int]:
    """Unit cells [t, t+1) inside any interval: the brute-force picture of a union."""
    return {cell for start, end in spans for cell in range(start, end)}


def floats(spans: list[tuple[int, int]]) -> list[Interval]:
    return [(float(start), float(end)) for start, end in spans]


@given(a=intervals, b=intervals)
def test_overlap_equals_counting_cells(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    for host, main in ((a, b), (b, a)):
        phases = [Phase("sandbox", "host", start, end) for start, end in floats(host)]
        phases += [Phase("update", "main", start, end) for start, end in floats(main)]
        assert overlapped_host_seconds(phases) == len(covered(a) & covered(b))


@given(a=intervals, b=intervals)
def test_intersection_and_union_cover_the_same_cells(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    shared = interval_intersection(floats(a), floats(b))
    assert covered([(int(s), int(e)) for s, e in shared]) == covered(a) & covered(b)
    joined = interval_union(floats(a))
    assert covered([(int(s), int(e)) for s, e in joined]) == covered(a)
    assert all(x[1] < y[0] for x, y in itertools.pairwise(joined))


def test_an_interval_that_runs_backwards_is_an_error() -> None:
    with pytest.raises(ValueError, match="ends before it starts"):
        interval_union([(2.0, 1.0)])


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_are_relative_to_the_step_and_end_also_when_they_raise() -> None:
    clock, heard = Clock(), []
    timeline = Timeline(
        clock=clock,
        on_begin=lambda name: heard.append(f"+{name}"),
        on_end=lambda name: heard.append(f"-{name}"),
    )
    clock.now = 110.0
    timeline.begin_step()
    clock.now = 111.0
    with timeline.phase("sandbox", "host"):
        clock.now = 112.0
        with pytest.raises(RuntimeError), timeline.phase("old_log_probs"):
            clock.now = 115.0
            raise RuntimeError
        clock.now = 116.0
    expected = (Phase("sandbox", "host", 1.0, 6.0), Phase("old_log_probs", "main", 2.0, 5.0))
    assert timeline.phases() == expected
    assert heard == ["+sandbox", "+old_log_probs", "-old_log_probs", "-sandbox"]
    assert overlapped_host_seconds(timeline.phases()) == 3.0
    assert timeline.elapsed() == 6.0
    assert timeline_record(7, 1, timeline.phases()) == {
        "step": 7,
        "rank": 1,
        "phases": [
            {"name": "sandbox", "kind": "host", "start": 1.0, "end": 6.0},
            {"name": "old_log_probs", "kind": "main", "start": 2.0, "end": 5.0},
        ],
    }
    timeline.begin_step()
    assert timeline.phases() == ()


def test_a_phase_that_crosses_the_border_belongs_to_the_step_in_which_it_ends() -> None:
    clock = Clock()
    timeline = Timeline(clock=clock)
    with timeline.phase("save", "host"):
        clock.now += 2.0
        timeline.begin_step()
        clock.now += 1.0
    assert timeline.phases() == (Phase("save", "host", -2.0, 1.0),)


def test_threads_do_not_lose_phases() -> None:
    timeline = Timeline()

    def work(number: int) -> None:
        for _ in range(50):
            with timeline.phase(f"thread{number}", "host"):
                pass

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline.phases()) == 200
    assert all(p.start <= p.end for p in timeline.phases())


def test_waiting_for_host_work_hides_none_of_it() -> None:
    host = Phase("sandbox", "host", 0, 5)
    assert overlapped_host_seconds([host, Phase("reward", "wait", 1, 5)]) == 0
    assert (
        overlapped_host_seconds([host, Phase("reward", "wait", 1, 5), Phase("a", "main", 0, 1)])
        == 1
    )


def test_seconds_by_name_sums_repeated_phases() -> None:
    phases = [Phase("a", "main", 0, 1), Phase("b", "host", 0, 5), Phase("a", "main", 2, 4)]
    assert seconds_by_name(phases) == {"time/a": 3, "time/b": 5}
