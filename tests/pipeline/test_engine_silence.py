"""The error about a silent engine names the right process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ctrl_megatron.parallel.background import BackgroundLoop
from ctrl_megatron.pipeline.services import EngineSilence

LIMIT = 0.6


@pytest.fixture
def background() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.close()


def watched(background: BackgroundLoop, answers: Callable[[], Any]) -> EngineSilence:
    async def close() -> None: ...

    address = SimpleNamespace(pid=7, log_path="/nowhere/engine.log")
    engine: Any = SimpleNamespace(health=answers, close=close, address=address)
    return EngineSilence(engine, background, LIMIT)


async def at_once() -> None: ...


async def never() -> None:
    await asyncio.sleep(600)


async def holds_the_loop(seconds: float) -> None:
    time.sleep(seconds)


def wait_for_words(silence: EngineSilence) -> str:
    deadline = time.monotonic() + 10
    while (said := silence()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert said is not None
    return said


def test_an_engine_that_does_not_answer_is_named(background: BackgroundLoop) -> None:
    assert "the rollout engine (pid 7) runs but has not answered" in wait_for_words(
        watched(background, never)
    )


def test_a_coroutine_that_holds_the_loop_is_named_instead(background: BackgroundLoop) -> None:
    silence = watched(background, at_once)
    held = background.submit(holds_the_loop(2 * LIMIT))
    said = wait_for_words(silence)
    assert "has blocked the event loop for" in said
    assert "in holds_the_loop" in said and __file__ in said
    held.result()
