"""The order in which requests get workers, against a fair one: equal shares of time for
peers, and within a peer for its requests, whatever each sends and however long its jobs take.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.sandbox.service.fair_queue import FairQueue
from ctrl_megatron.sandbox.service.http import fairness_peer


class World:
    """Simulated workers, jobs and clock, with the times at which each job ran."""

    def __init__(self, workers: int) -> None:
        self.now = 0.0
        self.queue: FairQueue[int] = FairQueue(clock=lambda: self.now)
        self.ran: list[tuple[str, float, float]] = []
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        for worker in range(workers):
            self.queue.add(worker)

    async def request(self, peer: str, name: str, jobs: list[float], at_once: int = 16) -> None:
        """One request of jobs that take so many seconds; none may take more than 10."""
        share, slots = self.queue.register_request(peer), asyncio.Semaphore(at_once)

        async def one(seconds: float) -> None:
            async with slots:
                lease = await self.queue.acquire(share, 10.0)
                began = self.now
                await self._until(self.now + seconds)
                self.ran.append((name, began, self.now))
                self.queue.release(lease, lease.item)

        await asyncio.gather(*map(one, jobs))

    async def _until(self, when: float) -> None:
        end = asyncio.get_running_loop().create_future()
        heapq.heappush(self._ends, (when, next(self._numbers), end))
        await end

    async def play(self, *requests: asyncio.Task[None], until: float = 1e9) -> None:
        """Let time pass until the requests are done, or until then."""
        while self.now <= until:
            for _ in range(50):
                await asyncio.sleep(0)
            if all(task.done() for task in requests):
                return
            self.now, _, end = heapq.heappop(self._ends)
            end.set_result(None)

    def had(self, name: str, until: float) -> float:
        """Seconds of workers until then."""
        return sum(min(end, until) - began for who, began, end in self.ran if who == name)

    def end(self, prefix: str) -> float:
        return max(end for who, _, end in self.ran if who.startswith(prefix))


def start(world: World, *requests: tuple[str, str, list[float]]) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(world.request(*each)) for each in requests]


def test_a_problem_of_slow_cases_does_not_hold_back_those_of_one_case() -> None:
    async def scenario() -> World:
        world = World(2)
        slow = start(world, ("x", "slow", [7.5] * 100))
        for _ in range(5):
            await asyncio.sleep(0)
        honest = start(world, *(("x", f"honest {n}", [0.1]) for n in range(100)))
        await world.play(*honest)
        assert world.now <= 7.5 + 100 * 0.1 / 2 + 0.2, "its first two cases, then the honest ones"
        await world.play(*slow)
        return world

    world = asyncio.run(scenario())
    assert len(world.ran) == 200


@pytest.mark.parametrize(("first", "second"), [(1.0, 1.0), (5.0, 0.5), (0.2, 3.0)])
def test_two_requests_of_any_jobs_get_equal_time(first: float, second: float) -> None:
    async def scenario() -> World:
        world = World(2)
        tasks = start(world, ("x", "a", [first] * 600), ("x", "b", [second] * 600))
        await world.play(*tasks, until=60.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return world

    world = asyncio.run(scenario())
    a, b = world.had("a", 60.0), world.had("b", 60.0)
    assert abs(a - b) <= 4 * max(first, second)


def test_many_requests_of_one_peer_take_nothing_from_another() -> None:
    async def scenario() -> World:
        world = World(2)
        crowd = start(world, *(("x", f"crowd {n}", [1.0] * 4) for n in range(100)))
        for _ in range(5):
            await asyncio.sleep(0)
        lone = start(world, *(("y", f"lone {n}", [1.0]) for n in range(10)))
        await world.play(*crowd, *lone)
        return world

    world = asyncio.run(scenario())
    assert world.end("lone") <= 12.0
    assert Counter(name.split()[0] for name, *_ in world.ran) == {"crowd": 400, "lone": 10}


def test_who_comes_late_gets_no_more_than_its_share() -> None:
    """No peer gets credit for the time in which it sent no request."""

    async def scenario() -> World:
        world = World(1)
        early = start(world, ("x", "early", [1.0] * 40))
        await world.play(*early, until=20.0)
        late = start(world, ("x", "late", [1.0] * 40))
        other = start(world, ("y", "other", [1.0] * 40))
        await world.play(*early, *late, *other)
        return world

    world = asyncio.run(scenario())
    last = {name: [end for who, _, end in world.ran if who == name] for name in ("early", "late")}
    assert max(last["early"]) - 20 <= 85, "early has 20 left, a fourth of the worker is its share"
    began = world.ran[20:60]
    counts = Counter(name for name, *_ in began)
    assert 18 <= counts["other"] <= 22 and 8 <= counts["early"] <= 12


def test_jobs_and_equal_requests_keep_their_order() -> None:
    async def scenario() -> World:
        world = World(1)
        tasks = start(world, *(("x", str(n), [1.0]) for n in range(20)))
        await world.play(*tasks)
        return world

    assert [name for name, *_ in asyncio.run(scenario()).ran] == [str(n) for n in range(20)]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=20), st.booleans())
def test_those_who_leave_lose_no_item(asked: list[tuple[str, bool]], late: bool) -> None:
    """Cancelled while waiting, or in the very moment their turn came."""

    async def scenario() -> None:
        queue: FairQueue[int] = FairQueue()
        shares = [queue.register_request(peer) for peer, _ in asked]
        tasks = [asyncio.create_task(queue.acquire(share, 1.0)) for share in shares]
        await asyncio.sleep(0)
        assert (queue.waiting, queue.waiting_peer_count) == (
            len(asked),
            len({peer for peer, _ in asked}),
        )
        if late:
            queue.add(1)
        leaving = [t for t, (_, leaves) in zip(tasks, asked, strict=True) if leaves]
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        if not late:
            queue.add(1)
        for _ in range(len(asked) - len(leaving)):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            (ready,) = [t for t in tasks if t not in leaving and t.done()]
            tasks.remove(ready)
            lease = ready.result()
            queue.release(lease, lease.item)
        assert (queue.free_item_count, queue.waiting, queue.waiting_peer_count) == (1, 0, 0)
        assert all(abs(share.reserved) < 1e-9 for share in shares)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("127.0.0.1", "loopback"),
        ("127.9.9.9", "loopback"),
        ("::1", "loopback"),
        ("::ffff:127.0.0.1", "loopback"),
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        (None, "unknown"),
        ("no address", "unknown"),
    ],
)
def test_a_peer_is_where_a_request_comes_from(address: str | None, peer: str) -> None:
    assert fairness_peer(address) == peer
