"""Metrics and logs of a service: counters and durations for Prometheus, log lines as JSON objects.

Source: Prometheus text exposition format, version 0.0.4.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LOG_LEVELS = ("debug", "info", "warning", "error")
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 160.0)


@dataclass(slots=True)
class DurationHistogram:
    """Durations in seconds, counted by upper bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
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


@dataclass(slots=True)
class RequestTelemetry:
    """Counts and durations of requests, by route."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Answered requests by route and HTTP status."""
    durations: dict[str, DurationHistogram] = field(default_factory=dict)
    """Durations by route, from the first byte of the request to the answer."""

    def add(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self.requests[route, status] += 1
        self.durations.setdefault(route, DurationHistogram()).add(seconds)

    def lines(self) -> Iterable[str]:
        """The lines of all samples."""
        counts = (
            ({"route": route, "status": str(status)}, count)
            for (route, status), count in sorted(self.requests.items())
        )
        durations = (({"route": route}, took) for route, took in sorted(self.durations.items()))
        name, text = "sandbox_request_seconds", "Seconds to the answer."
        yield from metric_lines("counter", "sandbox_requests_total", "Answered requests.", *counts)
        yield from metric_lines("histogram", name, text, *durations)


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


class JsonLogFormatter(logging.Formatter):
    """Formats a log record as a JSON object with ``time``, ``level``, ``logger``, ``message``, the
    record's ``fields`` and any traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_json_lines(level: str) -> None:
    """Write this process's log records of at least ``level`` to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLogFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {value:.17g}" if inner else f"{name} {value:.17g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
