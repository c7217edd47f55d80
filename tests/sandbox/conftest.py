"""A running service and plain functions to talk to it (its client lives on a loop in another
thread).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sandbox_talk import BackgroundLoop, submission

from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.sandbox.wire import EvalResult, RunCodeRequest, RunCodeResponse

Result = TypeVar("Result")


@pytest.fixture(scope="session")
def on_loop() -> Iterator[BackgroundLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(coroutine: Coroutine[Any, Any, Result], /) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

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
