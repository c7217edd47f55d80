"""Prometheus's text format: the lines of counters, gauges and histograms.

Source: Prometheus text exposition format, version 0.0.4.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 160.0)


@dataclass(slots=True)
class DurationHistogram:
    """Durations in seconds, counted by upper bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_BOUNDS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str, labels: Mapping[str, str]) -> Iterable[str]:
        """The histogram's samples, cumulative as the format requires."""
        seen = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self.counts, strict=True):
            seen += count
            yield _sample(f"{name}_bucket", {**labels, "le": bound}, seen)
        yield _sample(f"{name}_sum", labels, self.total)
        yield _sample(f"{name}_count", labels, seen)


def metric_lines(
    kind: str, name: str, text: str, *samples: tuple[Mapping[str, str], float | DurationHistogram]
) -> Iterable[str]:
    """The lines of a metric of ``kind`` (``counter``, ``gauge``, ``histogram``) with labels and
    value of each sample.
    """
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        if isinstance(value, DurationHistogram):
            yield from value.lines(name, labels)
        else:
            yield _sample(name, labels, value)


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {value:.17g}" if inner else f"{name} {value:.17g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
