"""Running the service until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
from dataclasses import dataclass

from aiohttp import web

from ctrl_megatron.sandbox.jail import linux
from ctrl_megatron.sandbox.service import build_app
from ctrl_megatron.sandbox.workers import Pool, WorkerSettings

_OWNER_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that the service must not outlive."""

    pid: int
    main_thread: bool
    """Started by its main thread: the kernel's parent-death signal follows the thread, not the
    process.
    """


async def serve(
    settings: WorkerSettings,
    *,
    workers: int,
    host: str,
    port: int,
    drain_seconds: float = 10.0,
    owner: Owner | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT (running requests get ``drain_seconds``) or until ``owner`` is
    gone.

    Prints one line of JSON with the address and the isolation once it answers. Raises ``OSError``
    when the address is taken, ``IsolationRefused`` when the kernel does not give the isolation
    asked for.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tasks = [asyncio.create_task(_watch(owner, stop))] if owner else []
    pool = Pool(settings, workers)
    runner = web.AppRunner(
        build_app(pool), handler_cancellation=True, shutdown_timeout=drain_seconds, access_log=None
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise OSError(error.errno, _bind_error(host, port, error)) from error
        await pool.start()
        address = runner.addresses[0]
        note = {
            "host": address[0],
            "port": address[1],
            "isolation": pool.isolation,
            "scratch": pool.scratch,
        }
        print(json.dumps(note), flush=True)
        await stop.wait()
    finally:
        for task in tasks:
            task.cancel()
        await runner.cleanup()
        await pool.stop()


def _bind_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken; choose another with --port"
    return f"cannot listen on {host}:{port}: {error.strerror}"


async def _watch(owner: Owner, stop: asyncio.Event) -> None:
    """Stop when the owner ends: by its end of our stdin, or because we have another parent."""
    if owner.main_thread:
        linux.die_with_parent(owner.pid, signal.SIGTERM)
    loop = asyncio.get_running_loop()

    def stdin_event() -> None:
        if not os.read(sys.stdin.fileno(), 1024):
            loop.remove_reader(sys.stdin.fileno())
            stop.set()

    loop.add_reader(sys.stdin.fileno(), stdin_event)
    while os.getppid() == owner.pid:
        await asyncio.sleep(_OWNER_POLL_SECONDS)
    stop.set()
