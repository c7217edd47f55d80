"""A step's phases as a Chrome trace: every phase once, in microseconds, nested or apart."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.metrics import Phase
from ctrl_megatron.metrics.trace import chrome_trace

MILLISECONDS = st.integers(-500, 5000)
HOST = st.builds(
    lambda name, start, length: Phase(name, "host", start / 1e3, (start + length) / 1e3),
    st.sampled_from("abc"),
    MILLISECONDS,
    st.integers(0, 3000),
)


def tracks(trace: dict[str, Any]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(start, end) of the events by process and thread."""
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return found


def nested_or_apart(a: tuple[int, int], b: tuple[int, int]) -> bool:
    apart = a[1] <= b[0] or b[1] <= a[0]
    return apart or (a[0] <= b[0] and b[1] <= a[1]) or (b[0] <= a[0] and a[1] <= b[1])


def test_each_rank_is_a_process_with_named_threads() -> None:
    ranks = [
        [
            Phase("draw", "main", 0.0, 1.0),
            Phase("sandbox", "host", 1.0, 3.0),
            Phase("log_probs", "main", 1.0, 2.0),
            Phase("wait_sandbox", "wait", 2.0, 3.0),
        ],
        [Phase("draw", "main", 0.25, 1.0)],
    ]
    trace = json.loads(json.dumps(chrome_trace(ranks, 7)))
    named = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert named == {(0, 0): "main thread", (0, 1): "background", (1, 0): "main thread"}
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["rank 0", "rank 1"] and trace["otherData"] == {"step": 7}
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in events} == {
        ("draw", 0, 0, 0, 1_000_000),
        ("log_probs", 0, 0, 1_000_000, 1_000_000),
        ("wait_sandbox", 0, 0, 2_000_000, 1_000_000),
        ("sandbox", 0, 1, 1_000_000, 2_000_000),
        ("draw", 1, 0, 250_000, 750_000),
    }


@given(st.lists(HOST, max_size=12))
def test_work_aside_that_overlaps_is_on_tracks_of_its_own(phases: list[Phase]) -> None:
    trace = chrome_trace([phases], 1)
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    shown = Counter((e["name"], e["ts"], e["dur"]) for e in events)
    starts = [(p, round(p.start * 1e6)) for p in phases]
    assert shown == Counter((p.name, start, round(p.end * 1e6) - start) for p, start in starts)
    for spans in tracks(trace).values():
        assert all(nested_or_apart(a, b) for a in spans for b in spans)
    if len(phases) == 1:
        assert set(tracks(trace)) == {(0, 1)}
