"""Measure how fast the sandbox judges: ``python tools/bench/sandbox.py``.

The run also measures bare interpreters, and a service that starts a fresh interpreter with a file
for every case, which is how SandboxFusion works without isolation. ``--soak 100000`` instead runs
that many programs of several kinds and reports memory, descriptors and zombies during the run.
``--flood 256`` sends that many requests of a hundred noisy cases and other hostile requests at the
same time, and reports the service's memory and the latency of its health check.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import requests
from aiohttp import web

from ctrl_megatron.config.flags import ToolParser
from ctrl_megatron.sandbox import EmbeddedSandbox, RunCodeRequest, SandboxClient, SubmitRequest
from ctrl_megatron.sandbox.wire import (
    CommandRunResult,
    CommandRunStatus,
    RunCodeResponse,
    RunStatus,
    TestConfig,
)

CODE = "def f(x):\n    return x * x\n"
IMPORTS = (
    "import bisect, collections, datetime, functools, heapq, itertools, json, math, operator, os\n"
    "import random, re, statistics, string, sys, typing\n"
)
OVER_SUBSCRIPTION = 4
ROUNDS = 3
SOAK = (
    CODE,
    "def f(x):\n    return x\n",
    "import os\ndef f(x):\n    os._exit(0)\n",
    "def f(x):\n    open('left', 'w').write('x' * 4096)\n    return x * x\n",
    "def f(x):\n    print('x' * 100_000)\n    raise ValueError(x)\n",
    "raise SystemExit(0)",
    "def f(x:",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
    + CODE,
)
Work = Callable[[], Awaitable[object]]


def asserts(count: int) -> list[str]:
    """Tests that ``CODE`` passes."""
    return [f"assert f({i}) == {i * i}" for i in range(count)]


def judged(client: SandboxClient, count: int, code: str = CODE, *, check: bool = True) -> Work:
    """One submission with ``count`` asserts."""
    data = {"test_list": asserts(count)}
    config = TestConfig(dataset_type="MBPPDataset", language="python", provided_data=data)
    completion = f"```python\n{code}```"
    request = SubmitRequest(dataset="bench", id=0, completion=completion, config=config)

    async def work() -> None:
        accepted = (await client.submit(request)).accepted
        assert accepted or not check

    return work


def fresh(client: SandboxClient, cases: int, runs: int) -> Work:
    """``cases`` asserts in ``runs`` runs of the service with fresh interpreters."""
    per_run = cases // runs
    code = IMPORTS + CODE + "\n".join(asserts(per_run))
    request = RunCodeRequest(code=code, language="python")

    async def work() -> None:
        for _ in range(runs):
            assert (await client.run_code(request)).status is RunStatus.SUCCESS

    return work


def interpreter(program: str, *flags: str) -> Work:
    """One bare interpreter."""

    async def work() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, *flags, "-c", program)
        assert await process.wait() == 0

    return work


async def latencies(work: Work, count: int, at_once: int) -> tuple[float, list[float]]:
    """Units of work per second with ``at_once`` in flight, and the seconds that each took."""
    slots, seconds = asyncio.Semaphore(at_once), list[float]()

    async def one() -> None:
        async with slots:
            began = time.perf_counter()
            await work()
            seconds.append(time.perf_counter() - began)

    await work()
    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return count / (time.perf_counter() - started), seconds


async def measured(rows: dict[str, Work], count: int, at_once: int) -> dict[str, float]:
    """Units of work per second: the median of rounds in which all rows alternate, so that a slower
    phase of the machine affects all of them.
    """
    rates: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(ROUNDS):
        for name, work in rows.items():
            rates[name].append((await latencies(work, max(count // ROUNDS, 1), at_once))[0])
    return {name: statistics.median(values) for name, values in rates.items()}


async def compare(ours: str, fresh_endpoint: str, count: int, workers: int) -> None:
    """Print problems per second relative to the fresh-interpreter service, then latencies."""
    program = IMPORTS + CODE + "assert f(3) == 9"
    async with SandboxClient(ours) as client, SandboxClient(fresh_endpoint) as other:
        rows: dict[str, Work] = {
            "fresh-interpreter service, 1 assert": fresh(other, 1, 1),
            "fresh-interpreter service, 3 asserts, 3 runs": fresh(other, 3, 3),
            "fresh-interpreter service, 100 asserts, 1 run": fresh(other, 100, 1),
            "bare python with imports, 1 assert": interpreter(program),
            "bare python -I -S, 1 assert": interpreter(CODE + "assert f(3) == 9", "-I", "-S"),
            "sandbox, 1 assert": judged(client, 1),
            "sandbox, 3 asserts": judged(client, 3),
            "sandbox, 100 asserts": judged(client, 100),
        }
        rates = await measured(rows, count, 2 * workers)
        unit = next(iter(rates.values()))
        print(f"{'':48}problems/s     ratio")
        for name, value in rates.items():
            print(f"{name:48}{value:10.1f}{value / unit:10.2f}")
        at_once = OVER_SUBSCRIPTION * workers
        print(f"\nlatency with {at_once} requests at once on {workers} workers, ms (median, p99)")
        for name in ("sandbox, 3 asserts", "fresh-interpreter service, 3 asserts, 3 runs"):
            _, seconds = await latencies(rows[name], count, at_once)
            p99 = statistics.quantiles(seconds, n=100)[98] if len(seconds) > 1 else seconds[0]
            print(f"{name:48}{statistics.median(seconds) * 1e3:10.1f}{p99 * 1e3:10.1f}")


async def soak(service: EmbeddedSandbox, count: int, workers: int) -> None:
    """Print the resources of the service and its workers before, during and after ``count``
    jobs.
    """
    async with SandboxClient(service.endpoint) as client:
        works = [judged(client, 1, code, check=False) for code in SOAK]

        async def loop(numbers: Iterator[int]) -> None:
            for number in numbers:
                await works[number % len(works)]()

        def show(number: int) -> None:
            own = psutil.Process(service.pid)
            tree = [own, *own.children(recursive=True)]
            zombies = sum(process.status() == psutil.STATUS_ZOMBIE for process in tree)
            resident = sum(process.memory_info().rss for process in tree) >> 10
            descriptors = sum(process.num_fds() for process in tree)
            print(f"{number:9}{resident:14}{descriptors:14}{len(tree):12}{zombies:10}", flush=True)

        for work in works * workers:
            await work()
        print(f"{'jobs':>9}{'resident KiB':>14}{'descriptors':>14}{'processes':>12}{'zombies':>10}")
        show(0)
        started, parts = time.perf_counter(), 10
        for part in range(parts):
            # Measured when idle: resources of running jobs are not growth.
            numbers = iter(range(count * part // parts, count * (part + 1) // parts))
            await asyncio.gather(*(loop(numbers) for _ in range(2 * workers)))
            show(count * (part + 1) // parts)
        print(f"{count / (time.perf_counter() - started):.1f} jobs/s")


async def flood(service: EmbeddedSandbox, count: int) -> None:
    """Print the service's memory before, at most and after, the largest answer, and the latency of
    ``/v1/ping`` while ``count`` hostile requests are in work.
    """
    noisy = "import sys\nfor s in (sys.stdout, sys.stderr): s.write('\\0' * 20_000)"
    cases = [{"input": {"stdin": "1" * 2000}, "output": {"stdout": "2"}}] * 100
    fences = "```python\n" * 4000
    own, peak, longest = psutil.Process(service.pid), 0, 0

    def asked(text: str, data: dict[str, Any]) -> SubmitRequest:
        config = TestConfig(
            dataset_type="CommonOJDataset",
            language="python",
            provided_data=data,
            extra={"run_all_cases": True},
        )
        return SubmitRequest(dataset="flood", id=0, completion=text, config=config)

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, own.memory_info().rss)
            await asyncio.sleep(0.02)

    async def one(client: SandboxClient, number: int) -> None:
        nonlocal longest
        kinds = [
            asked(f"```python\n{noisy}\n```", {"test": cases}),
            asked(fences + str(number), {"test": cases[:1]}),
            asked("x = [1,\n" * 4000, {"test": cases[:1]}),
            asked(f"```python\n{noisy}\n```", {"test": cases[:1], "more": [number] * 45_000}),
        ]
        for request in kinds:
            longest = max(longest, len((await client.submit(request)).model_dump_json()))

    before = own.memory_info().rss
    # From a process of its own: this one is busy with the requests.
    command = [sys.executable, __file__, "--ping", service.endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as pinging:
        async with SandboxClient(service.endpoint) as client:
            watching = asyncio.create_task(watch())
            await asyncio.gather(*(one(client, number) for number in range(count)))
            watching.cancel()
        pings = pinging.communicate()[0].decode()
    sizes = (before >> 20, peak >> 20, own.memory_info().rss >> 20)
    print("service, MiB: {} before, {} at most, {} after".format(*sizes))
    print(f"largest answer: {longest >> 10} KiB")
    print(pings, end="")


def ping(endpoint: str) -> None:
    """Ask for the health of a service until stdin ends, then print how long that took."""
    seconds = list[float]()
    with requests.Session() as session:
        while not select.select([sys.stdin], [], [], 0.02)[0]:
            began = time.perf_counter()
            session.get(f"{endpoint}/v1/ping", timeout=60)
            seconds.append(time.perf_counter() - began)
    shown = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98], max(seconds)
    print("ping, ms: {:.1f} median, {:.1f} p99, {:.1f} max".format(*(1e3 * s for s in shown)))


async def fresh_service() -> None:
    """The service for comparison: it runs any program without isolation, only for this bench."""

    async def run_code(request: web.Request) -> web.Response:
        asked = RunCodeRequest.model_validate_json(await request.read())
        async with slots:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, f"{os.urandom(8).hex()}.py")
                path.write_text(asked.code)
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, str(path)),
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                async with asyncio.timeout(asked.run_timeout):
                    out, err = await process.communicate()
        ended = CommandRunResult(
            status=CommandRunStatus.FINISHED,
            return_code=process.returncode,
            stdout=out.decode(),
            stderr=err.decode(),
        )
        status = RunStatus.SUCCESS if process.returncode == 0 else RunStatus.FAILED
        answer = RunCodeResponse(status=status, run_result=ended)
        return web.Response(text=answer.model_dump_json(), content_type="application/json")

    slots = asyncio.Semaphore(os.cpu_count() or 1)
    app = web.Application()
    app.router.add_post("/run_code", run_code)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


@contextmanager
def fresh_interpreters() -> Iterator[str]:
    """The address of a service with fresh interpreters, which runs until its stdin closes."""
    command = [sys.executable, __file__, "--fresh-service"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


def main() -> None:
    """Parse, start the services, measure."""
    parser = ToolParser(__doc__)
    parser.add_argument("--count", type=int, default=200, help="problems per row")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--isolation", default="strict")
    parser.add_argument("--soak", type=int, default=0, help="jobs to run instead of comparing")
    parser.add_argument("--flood", type=int, default=0, help="hostile requests to send instead")
    parser.add_argument("--ping", help=argparse.SUPPRESS)
    parser.add_argument("--fresh-service", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ping:
        ping(options.ping)
        return
    if options.fresh_service:
        asyncio.run(fresh_service())
        return
    with EmbeddedSandbox.start(workers=options.workers, isolation=options.isolation) as service:
        print(f"isolation: {service.isolation}")
        if options.soak:
            asyncio.run(soak(service, options.soak, options.workers))
            return
        if options.flood:
            asyncio.run(flood(service, options.flood))
            return
        with fresh_interpreters() as endpoint:
            asyncio.run(compare(service.endpoint, endpoint, options.count, options.workers))


if __name__ == "__main__":
    main()
