"""Counters of engines, and the metrics of a step that follow from them. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ctrl_megatron.types import Completion

Counters = dict[str, float]
"""Numbers of one engine by name; a number that an engine does not report is absent.

Since its start: ``drawn_tokens``; ``busy_seconds`` with at least one request; ``prompt_tokens``,
``cached_tokens`` (of the prompts, whose keys and values existed already) and ``preemptions`` of
finished completions; ``queued_seconds``, summed over them. At this moment: ``under_way``, the
completions that were asked for, and ``waiting``, those of them that the engine has no room for.
"""


class RequestMeter:
    """Counts the requests of one engine, of any kind."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._drawn = self._under_way = self._requests = 0
        self._busy = self._since = 0.0

    @contextmanager
    def count_request(self, completions: int) -> Iterator[Callable[[Sequence[Completion]], None]]:
        """The body is a request for so many completions; it calls the function with the finished
        ones.
        """
        if not self._requests:
            self._since = self._clock()
        self._requests += 1
        self._under_way += completions
        try:
            yield self._finished
        finally:
            self._under_way -= completions
            self._requests -= 1
            if not self._requests:
                self._busy += self._clock() - self._since

    def _finished(self, completions: Sequence[Completion]) -> None:
        self._drawn += sum(len(one.token_ids) for one in completions)

    def counters(self) -> Counters:
        """``drawn_tokens``, ``busy_seconds`` and ``under_way``."""
        running = self._clock() - self._since if self._requests else 0.0
        return {
            "drawn_tokens": self._drawn,
            "busy_seconds": self._busy + running,
            "under_way": self._under_way,
        }


def step_metrics(before: Mapping[str, Counters], now: Mapping[str, Counters]) -> dict[str, float]:
    """The metrics ``engine/...`` of the time between two looks at the counters of all engines, by
    engine. A metric of which an engine reports no part is absent.
    """
    grown = [_grown(before.get(engine, {}), counters) for engine, counters in now.items()]
    total = {
        name: sum(one[name] for one in grown)
        for name in (grown[0] if grown else ())
        if all(name in one for one in grown)
    }
    rates = [one["drawn_tokens"] / one["busy_seconds"] for one in grown if one["busy_seconds"] > 0]
    metrics = {"engine/tokens_per_second": sum(rates)} if rates else {}
    if total.get("prompt_tokens") and "cached_tokens" in total:
        metrics["engine/cache_hit_rate"] = total["cached_tokens"] / total["prompt_tokens"]
    if "preemptions" in total:
        metrics["engine/preemptions"] = total["preemptions"]
    if total.get("busy_seconds") and "queued_seconds" in total:
        metrics["engine/queue_length"] = total["queued_seconds"] / total["busy_seconds"]
    return metrics


def _grown(before: Counters, now: Counters) -> Counters:
    """The growth of the counters; an engine that was started again counts from 0."""
    again = any(now.get(name, 0.0) < value for name, value in before.items() if name in _GROWING)
    return {name: now[name] - (0.0 if again else before.get(name, 0.0)) for name in now}


_GROWING = (
    *("drawn_tokens", "busy_seconds", "prompt_tokens", "cached_tokens", "preemptions"),
    "queued_seconds",
)
