"""Attempts of an HTTP request: which failures are worth another attempt, and the pause before it.

Clients of sandboxes, of providers that run programs and of chat services follow these rules.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp

T = TypeVar("T")

CONNECTION_FAILURES = (aiohttp.ClientError, TimeoutError, OSError)
"""Exceptions of a request that got no answer."""
_TEMPORARY = (408, 409, 425, 429)
_LONGEST_PAUSE = 60.0


class SilenceDeadline:
    """The time until a request is given up: ``seconds`` after the last sign of life of the service,
    whatever the number of attempts.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.restart_countdown()

    def restart_countdown(self) -> None:
        self._until = time.monotonic() + self.seconds

    def cap_seconds_left(self, seconds: float) -> None:
        """Give the request up after ``seconds`` from now, unless the service is heard before."""
        self._until = min(self._until, time.monotonic() + seconds)

    def extend(self, seconds: float) -> None:
        """Let the time end ``seconds`` later: the last ``seconds`` do not count."""
        self._until += seconds

    @property
    def seconds_left(self) -> float:
        """Seconds that remain; at least 0."""
        return max(0.0, self._until - time.monotonic())


def is_temporary(status: int) -> bool:
    """True for an HTTP status that another attempt may change."""
    return status in _TEMPORARY or status >= 500


def backoff_seconds(failed: int, backoff: float) -> float:
    """Seconds to wait after attempt number ``failed`` (from 0): ``backoff``, doubled for each
    attempt up to 60 s, and a random part of ``backoff``.
    """
    return min(backoff * 2 ** min(failed, 64), _LONGEST_PAUSE) + random.uniform(0.0, backoff)


def retry_after(header: str) -> float:
    """The header ``Retry-After`` in seconds, at most 60; 0 where it is missing or a date."""
    try:
        seconds = float(header)
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), _LONGEST_PAUSE) if math.isfinite(seconds) else 0.0


def describe_failure(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def retry(
    attempt: Callable[[], Awaitable[T]],
    again: Callable[[Exception], float | None],
    *,
    attempts: int,
    backoff: float,
) -> T:
    """The result of ``attempt``, which is called up to ``attempts`` times.

    ``again`` receives the exception of a failed attempt and returns the least seconds until the
    next one, or None where another attempt is pointless. The last exception is raised.
    """
    for failed in range(attempts):
        try:
            return await attempt()
        except Exception as error:
            least = again(error) if failed + 1 < attempts else None
            if least is None:
                raise
        await asyncio.sleep(max(backoff_seconds(failed, backoff), least))
    raise ValueError(f"attempts must be at least 1, got {attempts}")
