"""From a callback to a stream of its arguments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any


async def told_by(
    work: Callable[[Callable[[Any], None]], Awaitable[None]],
) -> AsyncGenerator[Any, None]:
    """Yield every argument with which ``work`` calls the function passed to it, at once and in
    order; then raise its error, if any. Closing the iterator (``contextlib.aclosing``) cancels the
    work.
    """
    told: asyncio.Queue[Any] = asyncio.Queue()
    over = object()
    task = asyncio.ensure_future(work(told.put_nowait))
    task.add_done_callback(lambda _: told.put_nowait(over))
    try:
        while (what := await told.get()) is not over:
            yield what
        await task
    finally:
        task.cancel()
        await asyncio.wait([task])
