"""A running service and plain functions to talk to it (its client lives on a loop in another
thread).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.sandbox.wire import (
    EvalResult,
    RunCodeRequest,
    RunCodeResponse,
    SubmitRequest,
    TestConfig,
)

Result = TypeVar("Result")


class BackgroundLoop(Protocol):
    def __call__(self, coroutine: Coroutine[Any, Any, Result], /) -> Result: ...


@pytest.fixture(scope="session")
def on_loop() -> Iterator[BackgroundLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(coroutine: Coroutine[Any, Any, Result], /) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(120)

    yield call
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="session")
def service() -> Iterator[EmbeddedSandbox]:
    with EmbeddedSandbox.start(workers=2, isolation="standard") as running:
        yield running


@pytest.fixture(scope="session")
def client(service: EmbeddedSandbox, on_loop: BackgroundLoop) -> Iterator[SandboxClient]:
    talker = SandboxClient(service.endpoint, attempts=1)
    yield talker
    on_loop(talker.close())


@pytest.fixture(scope="session")
def run_code(client: SandboxClient, on_loop: BackgroundLoop) -> Callable[..., RunCodeResponse]:
    def run(code: str, **options: Any) -> RunCodeResponse:
        request = RunCodeRequest(code=code, language="python", **options)
        return on_loop(client.run_code(request))

    return run


def submission(code: str, *, fenced: bool = True, **config: Any) -> SubmitRequest:
    """A request to judge ``code``; ``run_all`` and the fields of TestConfig are options."""
    run_all = config.pop("run_all", True)
    text = f"```python\n{code}\n```" if fenced else code
    settings = {"language": "python", "run_timeout": 10.0, "extra": {"run_all_cases": run_all}}
    return SubmitRequest(
        dataset="tests", id=7, completion=text, config=TestConfig(**{**settings, **config})
    )


@pytest.fixture(scope="session")
def judge(client: SandboxClient, on_loop: BackgroundLoop) -> Callable[..., EvalResult]:
    """Judge a program by asserts."""

    def run(
        code: str, tests: list[str], *, entry_point: Any = None, setup: str = "", **config: Any
    ) -> EvalResult:
        data = {"test_list": tests, "test_setup_code": setup, "entry_point": entry_point}
        request = submission(code, dataset_type="MBPPDataset", provided_data=data, **config)
        return on_loop(client.submit(request))

    return run


@pytest.fixture(scope="session")
def judge_stdio(client: SandboxClient, on_loop: BackgroundLoop) -> Callable[..., EvalResult]:
    """Judge a program by (stdin, expected stdout) pairs."""

    def run(code: str, cases: list[tuple[str, str]], **config: Any) -> EvalResult:
        test = [{"input": {"stdin": i}, "output": {"stdout": o}} for i, o in cases]
        config = {"provided_data": {"test": test}, **config}
        request = submission(code, dataset_type="CommonOJDataset", **config)
        return on_loop(client.submit(request))

    return run


@pytest.fixture(scope="session")
def shared_data() -> Path:
    folder = Path(__file__).parents[2].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the folder with the real data sets is not here")
    return folder


IDLE = 2
"""Processes of a worker without a job: supervisor and forker."""


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
