"""Counts and durations of the service, and their text for Prometheus.

Source: Prometheus text exposition format, version 0.0.4.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 160.0)


@dataclass(slots=True)
class Histogram:
    """Durations in seconds, counted by upper bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(_BOUNDS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterable[str]:
        """Its samples, cumulative as the format has it."""
        seen = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self.counts, strict=True):
            seen += count
            yield _sample(f"{name}_bucket", {**labels, "le": bound}, seen)
        yield _sample(f"{name}_sum", labels, self.total)
        yield _sample(f"{name}_count", labels, seen)


@dataclass(slots=True)
class Telemetry:
    """What the service's routes did."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By route and HTTP status."""
    durations: dict[str, Histogram] = field(default_factory=dict)
    """By route, from the first byte of the request to the answer."""

    def add(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self.requests[route, status] += 1
        self.durations.setdefault(route, Histogram()).add(seconds)

    def lines(self) -> Iterable[str]:
        """All samples."""
        yield from _head("sandbox_requests_total", "counter", "Answered requests.")
        for (route, status), count in sorted(self.requests.items()):
            labels = {"route": route, "status": str(status)}
            yield _sample("sandbox_requests_total", labels, count)
        yield from _head("sandbox_request_seconds", "histogram", "Seconds to the answer.")
        for route, histogram in sorted(self.durations.items()):
            yield from histogram.lines("sandbox_request_seconds", {"route": route})


def gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> list[str]:
    """A value that goes up and down."""
    return [*_head(name, "gauge", text), _sample(name, labels or {}, value)]


def counter(name: str, text: str, value: float) -> list[str]:
    """A value that only grows."""
    return [*_head(name, "counter", text), _sample(name, {}, value)]


def duration(name: str, text: str, histogram: Histogram) -> list[str]:
    """A histogram without labels."""
    return [*_head(name, "histogram", text), *histogram.lines(name, {})]


def isolation(reached: Mapping[str, Any]) -> list[str]:
    """The isolation reached, as labels of a constant."""
    labels = {key: str(reached[key]) for key in ("level", "tier", "seccomp", "landlock")}
    labels["cgroups"] = " ".join(reached["cgroups"])
    return gauge("sandbox_isolation_info", "Isolation that programs run in.", 1, labels)


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {value:.17g}" if inner else f"{name} {value:.17g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
