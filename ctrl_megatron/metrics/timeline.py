"""Records when each phase of a step ran, on the main thread and aside, and their overlap."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

Kind = Literal["main", "host", "wait"]
"""``main``: work on the rank's main thread; ``host``: work on the background loop; ``wait``: the
main thread waits for host work, so this time hides nothing."""
Interval = tuple[float, float]
"""Start and end in seconds, start <= end."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One named interval of work."""

    name: str
    kind: Kind
    start: float
    """Seconds since the step began; negative if the phase began in the step before."""
    end: float
    """Seconds since the step began."""

    @property
    def interval(self) -> Interval:
        return self.start, self.end


class PhaseMeter(Protocol):
    """A further measurement of the main thread's phases."""

    def begin_phase(self, name: str) -> None: ...
    def end_phase(self, name: str) -> None: ...


class Timeline:
    """Records the phases of the current step; safe to use from several threads.

    ``on_begin`` and ``on_end`` are called with the name of every phase (by a live display),
    ``meter`` at both ends of phases of kind ``main``.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_begin: Callable[[str], None] | None = None,
        on_end: Callable[[str], None] | None = None,
        meter: PhaseMeter | None = None,
    ) -> None:
        self._meter = meter
        self._clock, self._on_begin, self._on_end = clock, on_begin, on_end
        self._lock = threading.Lock()
        self._phases: list[Phase] = []
        self._origin = clock()

    def begin_step(self) -> None:
        """Forget the finished phases and start counting from zero."""
        with self._lock:
            self._phases, self._origin = [], self._clock()

    @contextmanager
    def phase(self, name: str, kind: Kind = "main") -> Iterator[None]:
        """Record the body as a phase, also when it raises."""
        if self._on_begin is not None:
            self._on_begin(name)
        meter = self._meter if kind == "main" else None
        if meter is not None:
            meter.begin_phase(name)
        start = self._clock()
        try:
            yield
        finally:
            end = self._clock()
            if meter is not None:
                meter.end_phase(name)
            with self._lock:
                self._phases.append(Phase(name, kind, start - self._origin, end - self._origin))
            if self._on_end is not None:
                self._on_end(name)

    def phases(self) -> tuple[Phase, ...]:
        """The finished phases of this step by start."""
        with self._lock:
            return tuple(sorted(self._phases, key=lambda p: (p.start, p.end, p.name)))

    def elapsed(self) -> float:
        """Seconds since the step began."""
        return self._clock() - self._origin


def timeline_record(step: int, rank: int, phases: Iterable[Phase]) -> dict[str, object]:
    """A rank's phases of a step as one line of ``timeline.jsonl``."""
    return {"step": step, "rank": rank, "phases": [asdict(p) for p in phases]}


def seconds_by_name(phases: Iterable[Phase]) -> dict[str, float]:
    """Summed length of the phases of each name, as ``time/<name>`` metrics, by first start."""
    totals: dict[str, float] = {}
    for phase in phases:
        key = f"time/{phase.name}"
        totals[key] = totals.get(key, 0.0) + phase.end - phase.start
    return totals


def interval_union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of the intervals, as disjoint intervals in order, without empty ones. ValueError
    for an interval that ends before it starts."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if end < start:
            raise ValueError(f"the interval ({start}, {end}) ends before it starts")
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif end > start:
            joined.append((start, end))
    return joined


def interval_intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    pairs = (
        (max(x[0], y[0]), min(x[1], y[1])) for x in interval_union(a) for y in interval_union(b)
    )
    return [(start, end) for start, end in pairs if start < end]


def overlapped_host_seconds(phases: Sequence[Phase]) -> float:
    """Seconds of host work that main-thread work covered (``perf/overlap_seconds``)."""
    host = [p.interval for p in phases if p.kind == "host"]
    main = [p.interval for p in phases if p.kind == "main"]
    return sum(end - start for start, end in interval_intersection(host, main))
