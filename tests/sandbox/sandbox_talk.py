"""Requests that the tests of this folder send, and functions to inspect a service's processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ctrl_megatron.sandbox.wire import SubmitRequest, TestConfig

Result = TypeVar("Result")


class BackgroundLoop(Protocol):
    def __call__(self, coroutine: Coroutine[Any, Any, Result], /) -> Result: ...


def submission(code: str, *, fenced: bool = True, **config: Any) -> SubmitRequest:
    """A request to judge ``code``; ``run_all`` and the fields of TestConfig are options."""
    run_all = config.pop("run_all", True)
    text = f"```python\n{code}\n```" if fenced else code
    settings = {"language": "python", "run_timeout": 10.0, "extra": {"run_all_cases": run_all}}
    return SubmitRequest(
        dataset="tests", id=7, completion=text, config=TestConfig(**{**settings, **config})
    )


IDLE = 2
"""Processes of a worker without a job: supervisor and fork server."""


def descendants(root: int) -> set[int]:
    """Living processes below ``root``, zombies included."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{name}/stat").read_text()
        except OSError:
            continue
        parents[int(name)] = int(stat.rpartition(")")[2].split()[1])
    found, frontier = set(), {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether ``condition`` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
