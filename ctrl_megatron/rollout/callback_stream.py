"""From a callback to a stream of its arguments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any


async def callback_stream(
    work: Callable[[Callable[[Any], None]], Awaitable[None]],
) -> AsyncGenerator[Any, None]:
    """Yield every argument with which ``work`` calls the function passed to it, at once and in
    order; then raise its error, if any. Closing the iterator (``contextlib.aclosing``) cancels the
    work.
    """
    arguments: asyncio.Queue[Any] = asyncio.Queue()
    end = object()
    task = asyncio.ensure_future(work(arguments.put_nowait))
    task.add_done_callback(lambda _: arguments.put_nowait(end))
    try:
        while (argument := await arguments.get()) is not end:
            yield argument
        await task
    finally:
        task.cancel()
        await asyncio.wait([task])
