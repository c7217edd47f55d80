"""Reads large texts in one thread beside the event loop. One after another: threads that parse at
the same time only wait for each other, and the event loop waits for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_READER = ThreadPoolExecutor(1, thread_name_prefix="reading")


async def run_in_reading_thread(
    read: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Call ``read(*args, **kwargs)`` in the reading thread. Raises what it raises."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_READER, lambda: read(*args, **kwargs))
