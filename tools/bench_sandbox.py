"""How fast the sandbox judges, against bare subprocesses, in one run: ``python
tools/bench_sandbox.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient, SubmitRequest
from ctrl_megatron.sandbox.wire import TestConfig

CODE = "def f(x):\n    return x * x\n"
IMPORTS = "import collections, datetime, heapq, itertools, json, math, random, re, string\n"
Work = Callable[[], Awaitable[None]]


def judged(client: SandboxClient, asserts: int) -> Work:
    """One submission with ``asserts`` asserts."""
    data = {"test_list": [f"assert f({i}) == {i * i}" for i in range(asserts)]}
    config = TestConfig(dataset_type="MBPPDataset", language="python", provided_data=data)
    request = SubmitRequest(
        dataset="bench", id=0, completion=f"```python\n{CODE}```", config=config
    )

    async def work() -> None:
        assert (await client.submit(request)).accepted

    return work


def interpreter(program: str, times: int, *flags: str) -> Work:
    """``times`` fresh interpreters one after the other, without any isolation."""

    async def work() -> None:
        for _ in range(times):
            process = await asyncio.create_subprocess_exec(sys.executable, *flags, "-c", program)
            assert await process.wait() == 0

    return work


async def rate(work: Work, count: int, workers: int) -> float:
    """Units of work per second, ``workers`` at a time."""
    slots = asyncio.Semaphore(workers)

    async def one() -> None:
        async with slots:
            await work()

    await one()
    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return count / (time.perf_counter() - started)


async def compare(service: EmbeddedSandbox, count: int, workers: int) -> None:
    """Print problems per second, each row relative to fresh interpreters with usual imports."""
    program = IMPORTS + CODE + "assert f(3) == 9"
    async with SandboxClient(service.endpoint) as client:
        rows: dict[str, Work] = {
            "fresh interpreter with imports, 1 assert": interpreter(program, 1),
            "fresh interpreter per assert, 3 asserts": interpreter(program, 3),
            "bare python -I -S, 1 assert": interpreter(CODE + "assert f(3) == 9", 1, "-I", "-S"),
            "sandbox, 1 assert": judged(client, 1),
            "sandbox, 3 asserts": judged(client, 3),
            "sandbox, 100 asserts": judged(client, 100),
        }
        rates = {name: await rate(work, count, workers) for name, work in rows.items()}
    unit = next(iter(rates.values()))
    print(f"isolation: {service.isolation}\n{'':44}problems/s     ratio")
    for name, value in rates.items():
        print(f"{name:44}{value:10.1f}{value / unit:10.2f}")


def main() -> None:
    """Parse, start the service, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--isolation", default="strict")
    options = parser.parse_args()
    with EmbeddedSandbox.start(workers=options.workers, isolation=options.isolation) as service:
        asyncio.run(compare(service, options.count, options.workers))


if __name__ == "__main__":
    main()
