"""Coroutines that run together and fail together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Value = TypeVar("Value")


async def gathered(calls: Sequence[Callable[[], Awaitable[Value]]]) -> list[Value]:
    """Run all calls together and return their results in order; the first exception cancels the
    other calls and is raised.
    """
    tasks = [asyncio.ensure_future(call()) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
