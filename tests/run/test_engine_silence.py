"""The error about a service that does not answer any more names the right culprit."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ctrl_megatron.background import BackgroundLoop
from ctrl_megatron.keeping import SilenceDetector
from ctrl_megatron.rollout.fleet import BlockedLoopDetector
from ctrl_megatron.rollout.kept_engine import EngineProbe
from ctrl_megatron.sandbox import EmbeddedSandbox
from ctrl_megatron.sandbox.kept import SandboxProbe

LIMIT = 0.6


@pytest.fixture
def probes() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.close()


def watched(probes: BackgroundLoop, answers: Callable[[], Any]) -> SilenceDetector:
    async def close() -> None: ...

    address = SimpleNamespace(pid=7, log_path="/nowhere/engine.log")
    engine: Any = SimpleNamespace(health=answers, close=close, address=address)
    return SilenceDetector(EngineProbe(engine), probes, LIMIT)


async def at_once() -> None: ...


async def never() -> None:
    await asyncio.sleep(600)


async def holds_the_loop(seconds: float) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.set_name("the reward 'mine'")
    time.sleep(seconds)


def wait_for_words(check: Callable[[], str | None], seconds: float = 10.0) -> str:
    deadline = time.monotonic() + seconds
    while (said := check()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert said is not None
    return said


def test_an_engine_that_does_not_answer_is_named(probes: BackgroundLoop) -> None:
    assert "the rollout engine (pid 7) runs but has not answered" in wait_for_words(
        watched(probes, never)
    )


def test_another_process_is_not_blamed_for_the_silence_of_the_one_before(
    probes: BackgroundLoop,
) -> None:
    silence = watched(probes, never)
    wait_for_words(silence)
    silence.reset()
    assert silence() is None
    wait_for_words(silence)


def test_a_coroutine_that_holds_the_loop_of_requests_is_named_and_no_engine(
    probes: BackgroundLoop,
) -> None:
    requests = BackgroundLoop()
    held, silence = BlockedLoopDetector(requests, LIMIT), watched(probes, at_once)
    assert held() is None and silence() is None
    blocked = requests.submit(holds_the_loop(3 * LIMIT))
    said = wait_for_words(held)
    assert said.startswith("the reward 'mine' has blocked the event loop of the requests")
    assert "in holds_the_loop" in said and __file__ in said
    blocked.result()
    requests.close()


def test_an_idle_loop_is_not_held() -> None:
    loop = BackgroundLoop()
    held, deadline = BlockedLoopDetector(loop, 1.5), time.monotonic() + 2.5
    while time.monotonic() < deadline:
        assert held() is None
        time.sleep(0.1)
    loop.close()


def test_a_loop_that_stays_blocked_does_not_keep_its_owner_from_closing_it() -> None:
    loop = BackgroundLoop()
    loop.submit(holds_the_loop(60))
    began = time.monotonic()
    loop.run_before_close(at_once())
    assert time.monotonic() - began < 10


def test_a_frozen_sandbox_is_named_and_a_busy_process_is_not_blamed_for_its_own_stop(
    probes: BackgroundLoop,
) -> None:
    with EmbeddedSandbox.start(workers=1) as box:
        silence = SilenceDetector(SandboxProbe(lambda: box, None), probes, LIMIT + 2.5)
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            assert silence() is None
            time.sleep(0.1)
        os.kill(box.pid, signal.SIGSTOP)
        try:
            said = wait_for_words(silence)
        finally:
            os.kill(box.pid, signal.SIGCONT)
    assert f"the sandbox service (pid {box.pid}) runs but has not answered for 3 s" in said
