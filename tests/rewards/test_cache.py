from __future__ import annotations

import asyncio

import pytest

from ctrl_megatron.rewards.cache import VerdictCache, json_fingerprint
from ctrl_megatron.types import Verdict


def named(name: str) -> Verdict:
    """A verdict with this name as its mark; ``unsure`` is a time-out."""
    return Verdict(passed=(True,), total=1, detail=(name,), timed_out=name == "unsure")


class Source:
    """Counts runs; every run waits for ``gate`` and then gives the verdict of the next name (an
    exception is raised).
    """

    def __init__(self, *answers: str | Exception) -> None:
        self.answers = list(answers)
        self.gate = asyncio.Event()
        self.runs = self.cancelled = 0

    async def __call__(self) -> Verdict:
        self.runs += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return named(answer)


def spin() -> asyncio.Future[None]:
    """Let every ready task run until it blocks."""

    async def yields() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    return asyncio.ensure_future(yields())


def test_simultaneous_callers_share_one_run_and_later_ones_the_result() -> None:
    async def main() -> None:
        source, results = Source("a"), VerdictCache()
        source.gate.set()
        answers = await asyncio.gather(*(results.get_or_run("k", source) for _ in range(50)))
        assert answers == [(named("a"), False)] + [(named("a"), True)] * 49
        assert await results.get_or_run("k", source) == (named("a"), True)
        assert source.runs == 1
        counters = results.counters
        assert (counters.runs, counters.joined, counters.hits) == (1, 49, 1)

    asyncio.run(main())


def test_different_keys_run_separately() -> None:
    async def main() -> None:
        source, results = Source("a", "b"), VerdictCache()
        source.gate.set()
        await asyncio.gather(results.get_or_run("k", source), results.get_or_run("l", source))
        assert source.runs == 2

    asyncio.run(main())


def test_a_failure_reaches_every_waiter_and_is_forgotten() -> None:
    async def main() -> None:
        source, results = Source(OSError("down"), "a"), VerdictCache()
        waiters = [asyncio.create_task(results.get_or_run("k", source)) for _ in range(3)]
        await spin()
        source.gate.set()
        outcomes = await asyncio.gather(*waiters, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["down"] * 3
        assert await results.get_or_run("k", source) == (named("a"), False)
        assert source.runs == 2

    asyncio.run(main())


def test_a_result_that_may_not_be_kept_is_shared_but_not_remembered() -> None:
    async def main() -> None:
        source, results = Source("unsure", "a"), VerdictCache()
        source.gate.set()
        both = await asyncio.gather(
            results.get_or_run("k", source), results.get_or_run("k", source)
        )
        assert both == [(named("unsure"), False), (named("unsure"), True)]
        assert await results.get_or_run("k", source) == (named("a"), False)
        assert len(results) == 1

    asyncio.run(main())


def test_a_cancelled_caller_leaves_the_run_to_the_others() -> None:
    async def main() -> None:
        source, results = Source("a"), VerdictCache()
        first = asyncio.create_task(results.get_or_run("k", source))
        second = asyncio.create_task(results.get_or_run("k", source))
        await spin()
        first.cancel()
        await spin()
        source.gate.set()
        assert await second == (named("a"), True)
        assert (source.runs, source.cancelled) == (1, 0)

    asyncio.run(main())


def test_the_last_caller_to_leave_cancels_the_run_and_a_new_one_starts_afresh() -> None:
    async def main() -> None:
        source, results = Source("a"), VerdictCache()
        waiters = [asyncio.create_task(results.get_or_run("k", source)) for _ in range(2)]
        await spin()
        for waiter in waiters:
            waiter.cancel()
        await asyncio.wait(waiters)
        late = asyncio.create_task(results.get_or_run("k", source))
        await spin()
        assert (source.runs, source.cancelled) == (2, 1)
        source.gate.set()
        assert await late == (named("a"), False)

    asyncio.run(main())


def test_results_survive_a_change_of_loop_and_runs_do_not() -> None:
    results = VerdictCache()

    async def fill() -> None:
        done, stuck = Source("a"), Source("b")
        done.gate.set()
        await results.get_or_run("done", done)
        task = asyncio.create_task(results.get_or_run("stuck", stuck))
        await spin()
        assert not task.done()  # asyncio.run cancels it

    async def use() -> None:
        source = Source("new")
        source.gate.set()
        assert await results.get_or_run("done", source) == (named("a"), True)
        assert await results.get_or_run("stuck", source) == (named("new"), False)

    asyncio.run(fill())
    asyncio.run(use())


def test_two_running_loops_are_refused() -> None:
    results = VerdictCache()

    async def other() -> None:
        with pytest.raises(RuntimeError, match="another event loop"):
            await results.get_or_run("k", Source("a"))

    async def main() -> None:
        task = asyncio.create_task(results.get_or_run("k", Source("a")))
        await spin()
        await asyncio.to_thread(asyncio.run, other())
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())


def test_fingerprints_separate_what_concatenation_would_merge() -> None:
    assert json_fingerprint("ab", "c") != json_fingerprint("a", "bc")
    assert json_fingerprint({"a": 1, "b": 2}) == json_fingerprint({"b": 2, "a": 1})
    assert json_fingerprint(1.0) != json_fingerprint("1.0")
