"""Imports of an engine's libraries."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """What is imported here stays, so no garbage collection looks at it, now or later; meanwhile
    they would take a third of SGLang's and two fifths of vLLM's import."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collected:
            gc.enable()
