"""Processes: nothing outlives the service, the service outlives nothing it belongs to, workers are
replaced.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from sandbox_talk import IDLE, BackgroundLoop, descendants, submission, wait_until

from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient, SandboxError
from ctrl_megatron.sandbox.client.embedded import SandboxStartError
from ctrl_megatron.sandbox.wire import RunCodeRequest, RunStatus

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own() -> Iterator[EmbeddedSandbox]:
    """A service that a test may kill."""
    with EmbeddedSandbox.start(workers=2) as running:
        yield running


def gone(pids: set[int]) -> Callable[[], bool]:
    return lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids)


def request(code: str, seconds: float = 30.0) -> RunCodeRequest:
    return RunCodeRequest(code=code, language="python", run_timeout=seconds)


async def busy_service(endpoint: str, started: Callable[[], bool]) -> asyncio.Task[object]:
    """A request that keeps a worker busy, once it does."""
    client = SandboxClient(endpoint, attempts=1)

    async def run() -> object:
        async with client:
            return await client.run_code(request("while True: pass"))

    task = asyncio.create_task(run())
    while not started():
        await asyncio.sleep(0.02)
    return task


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killing_the_service_ends_its_whole_tree(own: EmbeddedSandbox, number: int) -> None:
    async def scenario() -> None:
        task = await busy_service(own.endpoint, lambda: len(descendants(own.pid)) > 2 * IDLE)
        tree = descendants(own.pid)
        os.kill(own.pid, number)
        if number == signal.SIGTERM:
            task.cancel()
        with pytest.raises((SandboxError, asyncio.CancelledError)):
            await task
        assert await asyncio.to_thread(wait_until, gone(tree), 20)

    asyncio.run(scenario())
    assert wait_until(lambda: not own.alive())


def test_a_killed_worker_is_replaced_and_its_job_repeated(
    own: EmbeddedSandbox, on_loop: BackgroundLoop
) -> None:
    async def scenario() -> None:
        async with SandboxClient(own.endpoint, attempts=1) as client:
            for worker in descendants(own.pid):
                os.kill(worker, signal.SIGKILL)
            answers = await asyncio.gather(
                *(client.run_code(request("print(1)")) for _ in range(4))
            )
            assert {answer.status for answer in answers} == {RunStatus.SUCCESS}

    on_loop(scenario())
    assert wait_until(lambda: len(descendants(own.pid)) == 2 * IDLE)


def test_a_worker_is_replaced_even_if_its_directories_cannot_be_removed(
    on_loop: BackgroundLoop,
) -> None:
    async def scenario(service: EmbeddedSandbox) -> None:
        async with SandboxClient(service.endpoint, attempts=1, timeout=60) as client:
            # Gone already: there is nothing that removing them could not stumble over.
            for folder in Path(service.scratch).iterdir():
                shutil.rmtree(folder)
            for worker in descendants(service.pid):
                os.kill(worker, signal.SIGKILL)
            answers = [await client.run_code(request("print(1)")) for _ in range(2)]
            assert [answer.status for answer in answers] == [RunStatus.SUCCESS] * 2

    with EmbeddedSandbox.start(workers=1) as service:
        on_loop(scenario(service))
        assert "of an ended worker was not removed" in service.log()


def test_a_worker_killed_during_a_job_does_not_lose_the_job(
    own: EmbeddedSandbox, on_loop: BackgroundLoop
) -> None:
    async def scenario() -> None:
        async with SandboxClient(own.endpoint, attempts=1) as client:
            idle = descendants(own.pid)
            slow = asyncio.create_task(
                client.run_code(request("import time; time.sleep(1); print(1)"))
            )
            while not descendants(own.pid) - idle:
                await asyncio.sleep(0.02)
            for worker in idle:
                with suppress(ProcessLookupError):  # one may just have been replaced
                    os.kill(worker, signal.SIGKILL)
            assert (await slow).status is RunStatus.SUCCESS

    on_loop(scenario())


def test_a_client_that_leaves_frees_its_worker(
    own: EmbeddedSandbox, on_loop: BackgroundLoop
) -> None:
    async def scenario() -> None:
        task = await busy_service(own.endpoint, lambda: len(descendants(own.pid)) > 2 * IDLE)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    on_loop(scenario())
    assert wait_until(lambda: len(descendants(own.pid)) <= 2 * IDLE)


def test_the_service_ends_with_its_owner() -> None:
    code = (
        "import os, sys\nfrom ctrl_megatron.sandbox import EmbeddedSandbox\n"
        "s = EmbeddedSandbox.start(workers=1)\nprint(s.pid, flush=True)\n"
        "exec(sys.stdin.readline())\n"
    )
    endings = ("os.kill(os.getpid(), 9)", "os._exit(0)", "sys.exit(0)")
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in endings
    ]
    trees: list[set[int]] = []
    for owner in owners:
        assert owner.stdout is not None
        service = int(owner.stdout.readline())
        trees.append({service, *descendants(service)})
        assert len(trees[-1]) == 1 + IDLE
    for owner, ending in zip(owners, endings, strict=True):
        owner.communicate(f"{ending}\n", timeout=30)
    for tree, ending in zip(trees, endings, strict=True):
        assert wait_until(gone(tree)), f"the service outlived its owner, which ended by {ending}"


def test_a_service_started_by_a_thread_that_ended_lives_on() -> None:
    started: list[EmbeddedSandbox] = []

    async def start() -> None:
        started.append(await asyncio.to_thread(EmbeddedSandbox.start, workers=1))

    asyncio.run(start())
    (service,) = started
    try:
        asyncio.run(SandboxClient(service.endpoint).isolation_levels())
        assert service.alive()
    finally:
        service.stop()
    assert not service.alive()


def test_stop_leaves_nothing_and_may_be_repeated() -> None:
    service = EmbeddedSandbox.start(workers=1)
    tree = {service.pid, *descendants(service.pid)}
    folder = Path(service.scratch)
    service.stop()
    service.stop()
    assert gone(tree)() and not folder.exists()


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [
                sys.executable,
                ROOT / "tools" / "serve_sandbox.py",
                "--port",
                str(port),
                "--workers",
                "1",
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        == f"sandbox: port {port} on 127.0.0.1 is taken; choose another with --port"
    )


def test_a_module_that_cannot_be_preloaded_is_named() -> None:
    with pytest.raises(SandboxStartError, match="No module named 'no_such_module'"):
        EmbeddedSandbox.start(workers=1, preload=("no_such_module",), start_seconds=20)


def test_more_requests_than_workers_wait_their_turn(
    own: EmbeddedSandbox, on_loop: BackgroundLoop
) -> None:
    async def scenario() -> list[bool]:
        async with SandboxClient(own.endpoint, attempts=1) as client:
            data = {"test_list": ["assert f(1) == 1"]}
            todo = submission("def f(x): return x", dataset_type="MBPPDataset", provided_data=data)
            return [
                r.accepted for r in await asyncio.gather(*(client.submit(todo) for _ in range(100)))
            ]

    assert on_loop(scenario()) == [True] * 100
