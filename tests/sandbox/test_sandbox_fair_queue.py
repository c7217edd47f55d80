"""Fair queueing of clients, against a simulation that knows nothing of futures."""

from __future__ import annotations

import asyncio
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.sandbox.service.workers import FairQueue


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 3))
def test_clients_take_turns_and_keep_their_own_order(asked: list[str], items: int) -> None:
    async def scenario() -> list[tuple[str, int]]:
        queue: FairQueue[int] = FairQueue()
        served: list[tuple[str, int]] = []

        async def ask(client: str, number: int) -> None:
            item = await queue.acquire(client)
            served.append((client, number))
            await asyncio.sleep(0)
            queue.release(item)

        tasks = [asyncio.create_task(ask(c, n)) for n, c in enumerate(asked)]
        await asyncio.sleep(0)
        assert (queue.waiting, queue.clients) == (len(asked), len(set(asked)))
        for item in range(items):
            queue.release(item)
        await asyncio.gather(*tasks)
        assert (queue.waiting, queue.clients, queue.free) == (0, 0, items)
        return served

    queues: dict[str, deque[int]] = {}
    for number, client in enumerate(asked):
        queues.setdefault(client, deque()).append(number)
    expected, order = [], deque(queues)
    while order:
        client = order.popleft()
        expected.append((client, queues[client].popleft()))
        if queues[client]:
            order.append(client)
    assert asyncio.run(scenario()) == expected


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=20), st.booleans())
def test_those_who_leave_lose_no_item(asked: list[tuple[str, bool]], late: bool) -> None:
    """Cancelled while waiting, or in the very moment their turn came."""

    async def scenario() -> None:
        queue: FairQueue[int] = FairQueue()
        tasks = [asyncio.create_task(queue.acquire(client)) for client, _ in asked]
        await asyncio.sleep(0)
        if late:
            queue.release(1)
        leaving = [t for t, (_, leaves) in zip(tasks, asked, strict=True) if leaves]
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        if not late:
            queue.release(1)
        for _ in range(len(asked) - len(leaving)):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            (ready,) = [t for t in tasks if t not in leaving and t.done()]
            tasks.remove(ready)
            queue.release(ready.result())
        assert (queue.free, queue.waiting, queue.clients) == (1, 0, 0)

    asyncio.run(scenario())


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), max_size=20))
def test_requests_of_a_client_are_served_in_their_order(asked: list[tuple[str, int]]) -> None:
    async def scenario() -> list[tuple[str, int]]:
        queue: FairQueue[int] = FairQueue()
        served: list[tuple[str, int]] = []

        async def ask(client: str, request: int) -> None:
            item = await queue.acquire(client, request)
            served.append((client, request))
            queue.release(item)

        tasks = [asyncio.create_task(ask(*one)) for one in asked]
        await asyncio.sleep(0)
        queue.release(1)
        await asyncio.gather(*tasks)
        return served

    served = asyncio.run(scenario())
    for client in "ab":
        own = [request for name, request in asked if name == client]
        assert [request for name, request in served if name == client] == sorted(own)
