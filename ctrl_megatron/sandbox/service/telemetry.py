"""Metrics and logs of a service: counters and durations of requests, log lines as JSON objects."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ctrl_megatron.exposition import DurationHistogram, metric_lines

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(slots=True)
class RequestTelemetry:
    """Counts and durations of requests, by route."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Answered requests by route and HTTP status."""
    durations: dict[str, DurationHistogram] = field(default_factory=dict)
    """Durations by route, from the first byte of the request to the answer."""

    def add(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] += 1
        self.durations.setdefault(route, DurationHistogram()).add(seconds)

    def lines(self) -> Iterable[str]:
        counts = (
            ({"route": route, "status": str(status)}, count)
            for (route, status), count in sorted(self.requests.items())
        )
        durations = (({"route": route}, took) for route, took in sorted(self.durations.items()))
        name, text = "sandbox_request_seconds", "Seconds to the answer."
        yield from metric_lines("counter", "sandbox_requests_total", "Answered requests.", *counts)
        yield from metric_lines("histogram", name, text, *durations)


class JsonLogFormatter(logging.Formatter):
    """Formats a log record as a JSON object with ``time``, ``level``, ``logger``, ``message``, the
    record's ``fields`` and any traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
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
