"""Every wait of the ranks has a sign of life, a limit and an end by a stop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ctrl_megatron.background import (
    AbandonableCall,
    BackgroundLoop,
    advance_wait,
    describe_waits,
    track_wait,
)
from ctrl_megatron.errors import ServiceLost
from ctrl_megatron.parallel import waiting as waiting_file
from ctrl_megatron.parallel.stop import StopRequested
from ctrl_megatron.parallel.waiting import WaitedTooLong, WaitRules

ONE_RANK: Any = SimpleNamespace(
    is_first=True, any_rank=lambda *flags: flags, all_gather=lambda value: [value]
)


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    background = BackgroundLoop()
    yield background
    background.close()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_file, "_ROUND_SECONDS", 0.05)
    monkeypatch.setattr(waiting_file, "_SIGN_SECONDS", 0.3)


def alone(limit: float = 60.0) -> tuple[WaitRules, Any]:
    stop: Any = SimpleNamespace(is_set=False)
    return WaitRules(groups=ONE_RANK, stop=stop, limit=limit), stop


async def two_of_three(ends: asyncio.Event) -> int:
    with track_wait("the reward 'mine'", 3):
        advance_wait()
        await asyncio.to_thread(advance_wait)
        await ends.wait()
    return 7


def test_a_long_wait_says_what_it_waits_for(
    loop: BackgroundLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = asyncio.Event()
    threading.Timer(0.8, loop.loop.call_soon_threadsafe, (ends.set,)).start()
    assert alone()[0].wait_together(loop.submit(two_of_three(ends)), "the node judge") == 7
    said = capsys.readouterr().err.splitlines()
    assert set(said) == {
        f"waiting {n} s for the node judge: the reward 'mine' on 2 of 3 rows" for n in (0, 1)
    }
    assert len(said) == 2 and describe_waits() == []


def test_short_waits_say_nothing(loop: BackgroundLoop, capsys: pytest.CaptureFixture[str]) -> None:
    assert alone()[0].wait_together(loop.submit(asyncio.sleep(0.1, 5)), "an answer") == 5
    assert alone()[0].wait_together(None, "an answer") is None
    assert capsys.readouterr().err == ""


def test_a_wait_ends_at_its_limit_and_names_the_work(loop: BackgroundLoop) -> None:
    work = loop.submit(two_of_three(asyncio.Event()))
    with pytest.raises(WaitedTooLong, match=r"^the node judge: the reward 'mine' on 2 of 3 rows "):
        alone(limit=0.4)[0].wait_together(work, "the node judge")
    with pytest.raises(WaitedTooLong, match=r"bucket 3 did not end within 0\.5 s"):
        alone(limit=0.5)[0].wait_alone(lambda seconds: bool(time.sleep(seconds)), "bucket 3")


def test_a_stop_ends_a_wait_and_its_work(loop: BackgroundLoop) -> None:
    waiting, stop = alone()
    work = loop.submit(asyncio.sleep(60))
    threading.Timer(0.2, setattr, (stop, "is_set", True)).start()
    began = time.monotonic()
    with pytest.raises(StopRequested):
        waiting.wait_together(work, "an answer")
    assert time.monotonic() - began < 2 and work.cancelled()
    # After weights have changed, the step's work is finished.
    done = loop.submit(asyncio.sleep(0.2, 3))
    assert waiting.wait_together(done, "an answer", stoppable=False) == 3


def test_what_the_work_raises_is_raised_at_once(loop: BackgroundLoop) -> None:
    async def fails() -> None:
        raise LookupError("no such row")

    with pytest.raises(LookupError, match="no such row"):
        alone()[0].wait_together(loop.submit(fails()), "an answer")


def test_lost_work_is_lost_on_all_ranks_when_none_works_any_more(loop: BackgroundLoop) -> None:
    async def lost() -> None:
        raise ServiceLost("engine 1 died")

    others, meet, found = threading.Barrier(2), threading.Lock(), list[list[Any]]()

    def gathered(value: Any) -> list[Any]:
        with meet:
            if not found or len(found[-1]) == 2:
                found.append([])
            mine = found[-1]
            mine.append(value)
        others.wait(10)
        return mine

    groups: Any = SimpleNamespace(
        is_first=False,
        all_gather=gathered,
        any_rank=lambda *flags: tuple(map(any, zip(*gathered(flags), strict=True))),
    )
    waiting = WaitRules(groups=groups, stop=SimpleNamespace(is_set=False), limit=60.0)  # type: ignore[arg-type]
    slow, said = loop.submit(asyncio.sleep(0.5, 3)), list[str]()

    def rank(work: Any) -> None:
        with pytest.raises(ServiceLost) as caught:
            waiting.wait_together(work, "an answer")
        said.append(str(caught.value))

    ranks = [threading.Thread(target=rank, args=(work,)) for work in (loop.submit(lost()), slow)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(20)
    assert said == ["engine 1 died"] * 2 and slow.result(0) == 3


def test_an_abandoned_call_has_a_place_and_keeps_nothing_waiting() -> None:
    ends = threading.Event()
    call = AbandonableCall(lambda: time.sleep(0.01 * ends.wait()) or 4, "slow")
    assert call.alive() and " line " in call.current_line()
    ends.set()
    assert call.future.result(5) == 4
