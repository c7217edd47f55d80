"""Hundreds of clients while their service is killed and started again, or one of two is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter

import pytest
from sandbox_talk import submission

from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.sandbox.wire import EvalResult, SubmitRequest


def problem(number: int) -> SubmitRequest:
    """A problem whose program is wrong for the numbers 3, 7, 11...; the answer's id is
    the number.
    """
    shift = 1 if number % 4 == 3 else 0
    data = {"test_list": [f"assert f({number}) == {number * number}"], "entry_point": "f"}
    request = submission(
        f"def f(x): return x * x + {shift}",
        dataset_type="MBPPDataset",
        provided_data=data,
        run_timeout=60.0,
    )
    return request.model_copy(update={"id": number})


@pytest.mark.parametrize("clients", [192, pytest.param(1024, marks=pytest.mark.long)])
def test_every_request_is_answered_once_and_correctly_across_a_restart(clients: int) -> None:
    answers: list[EvalResult] = []

    async def one(endpoint: str, number: int) -> int:
        async with SandboxClient(endpoint, attempts=60, backoff=0.2, name=f"c{number}") as client:
            answers.append(await client.submit(problem(number)))
            return client.counters.retries

    async def scenario() -> list[int]:
        first = await asyncio.to_thread(EmbeddedSandbox.start, workers=2)
        port = int(first.endpoint.rpartition(":")[2])
        tasks = [asyncio.create_task(one(first.endpoint, n)) for n in range(clients)]
        while len(answers) < clients // 8:
            await asyncio.sleep(0.01)
        os.kill(first.pid, signal.SIGKILL)
        await asyncio.to_thread(first.stop)
        second = await asyncio.to_thread(EmbeddedSandbox.start, workers=2, port=port)
        try:
            return await asyncio.gather(*tasks)
        finally:
            await asyncio.to_thread(second.stop)

    retries = asyncio.run(scenario())
    assert sum(retries) > 0, "the service was killed too late to matter"
    assert Counter(answer.id for answer in answers) == Counter(range(clients))
    assert {a.id for a in answers if not a.accepted} == set(range(3, clients, 4))


def test_one_of_two_services_dies_and_the_other_takes_over() -> None:
    async def scenario() -> None:
        left = await asyncio.to_thread(EmbeddedSandbox.start, workers=1)
        right = await asyncio.to_thread(EmbeddedSandbox.start, workers=1)
        try:
            both = f"{left.endpoint},{right.endpoint}"
            async with SandboxClient(both, attempts=4, backoff=0.2) as client:
                tasks = [asyncio.create_task(client.submit(problem(n))) for n in range(40)]
                while sum(task.done() for task in tasks) < 5:
                    await asyncio.sleep(0.01)
                os.kill(left.pid, signal.SIGKILL)
                accepted = [(await task).accepted for task in tasks]
                assert accepted == [n % 4 != 3 for n in range(40)]
                before = client.counters.retries
                assert (await client.submit(problem(1))).accepted
                assert client.counters.retries == before, "a dead service was asked again"
        finally:
            left.stop()
            right.stop()

    asyncio.run(scenario())
