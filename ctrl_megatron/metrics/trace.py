"""The phases of a step on all ranks as a trace that Perfetto and Chrome open.

Format: "Trace Event Format" (Google, 2016), complete events in microseconds. Each rank is a
process; its main thread is one track, and work aside (``timeline.Kind`` ``host``) has as many
tracks as run at once, so that the events of a track are nested or apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ctrl_megatron.metrics.timeline import Phase

_MAIN, _ASIDE = 0, 1
"""Numbers of the main thread's track, and of the first one aside."""


def chrome_trace(ranks: Sequence[Sequence[Phase]], step: int) -> dict[str, Any]:
    """The trace of step number ``step``; ``ranks`` are the phases of each rank, in rank order, in
    seconds since a moment that all ranks share.
    """
    events: list[dict[str, Any]] = []
    for rank, phases in enumerate(ranks):
        aside = [phase for phase in phases if phase.kind == "host"]
        tracks = [[p for p in phases if p.kind != "host"], *phase_tracks(aside)]
        events.append(_named("process_name", f"rank {rank}", rank, _MAIN))
        for number, track in enumerate(tracks):
            name = "main thread" if number == _MAIN else "background"
            events.append(_named("thread_name", name, rank, number))
            events += [_event(phase, rank, number) for phase in track]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step": step}}


def phase_tracks(phases: Sequence[Phase]) -> list[list[Phase]]:
    """The phases, by start, on as few tracks as their first-fit order needs: any two phases of a
    track are nested or do not overlap.
    """
    tracks: list[list[Phase]] = []
    for phase in sorted(phases, key=lambda p: (p.start, -p.end)):
        for track in tracks:
            if all(phase.end <= other.end or phase.start >= other.end for other in track):
                track.append(phase)
                break
        else:
            tracks.append([phase])
    return tracks


def _event(phase: Phase, rank: int, track: int) -> dict[str, Any]:
    start, end = round(phase.start * 1e6), round(phase.end * 1e6)
    return {
        "name": phase.name,
        "cat": phase.kind,
        "ph": "X",
        "ts": start,
        "dur": end - start,
        "pid": rank,
        "tid": track,
    }


def _named(kind: str, name: str, rank: int, track: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}
