"""Running the service until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from ctrl_megatron.sandbox.access import require_safe_address
from ctrl_megatron.sandbox.endpoints import publish
from ctrl_megatron.sandbox.gate import GATE
from ctrl_megatron.sandbox.jail import linux
from ctrl_megatron.sandbox.service import build_app
from ctrl_megatron.sandbox.workers import Pool, WorkerSettings

_OWNER_POLL_SECONDS = 0.5
_BACKLOG = 4096
"""Connections that may wait to be accepted: a trainer opens hundreds at the same moment."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that the service must not outlive."""

    pid: int
    main_thread: bool
    """Started by its main thread: the kernel's parent-death signal follows the thread, not the
    process.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where the service listens and whom it lets in."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    token: str | None = None
    """Bearer token that clients must send; None lets everybody in."""
    allow_open: bool = False
    """Listen beyond loopback without a token."""
    drain_seconds: float = 10.0
    """What running requests get to finish once the service is told to stop."""
    endpoint_file: Path | None = None
    """Holds the service's address while it answers."""


async def serve(
    settings: WorkerSettings, *, workers: int, door: Door, owner: Owner | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, or until ``owner`` is gone.

    After the signal new work is answered 503 and running requests finish within
    ``door.drain_seconds``; a second signal ends them at once, as does the owner's end. Prints one
    line of JSON with the address and the isolation once it answers. Raises ``OSError`` when the
    address is taken, ``OpenAddress`` for one that everybody reaches, ``IsolationRefused`` when the
    kernel does not give the isolation asked for.
    """
    require_safe_address(door.host, door.token, allow_open=door.allow_open)
    told, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (at_once if told.is_set() else told).set())
    tasks = [asyncio.create_task(_watch(owner, at_once))] if owner else []
    pool = Pool(settings, workers)
    app = build_app(pool, token=door.token)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, door.host, door.port, backlog=_BACKLOG)
        try:
            await site.start()
        except OSError as error:
            raise OSError(error.errno, _bind_error(door, error)) from error
        await pool.start()
        _announce(runner, pool, door)
        await _first(told.wait(), at_once.wait())
        if not at_once.is_set():
            if door.endpoint_file is not None:
                door.endpoint_file.unlink(missing_ok=True)
            _log.info("draining", extra={"fields": {"running": app[GATE].running}})
            await _first(app[GATE].drain(door.drain_seconds), at_once.wait())
        _log.info("stopping", extra={"fields": {"cut_off": app[GATE].running}})
    finally:
        for task in tasks:
            task.cancel()
        if door.endpoint_file is not None:
            door.endpoint_file.unlink(missing_ok=True)
        await runner.cleanup()
        await pool.stop()


def _announce(runner: web.AppRunner, pool: Pool, door: Door) -> None:
    host, port = runner.addresses[0][:2]
    if door.endpoint_file is not None:
        publish(door.endpoint_file, [endpoint_of(host, port)])
    note = {"host": host, "port": port, "isolation": pool.isolation, "scratch": pool.scratch}
    print(json.dumps(note), flush=True)
    _log.info("serving", extra={"fields": {**note, "workers": pool.size}})
    if missing := pool.isolation.get("missing"):
        _log.warning("isolation is not complete", extra={"fields": {"missing": missing}})


def endpoint_of(host: str, port: int) -> str:
    """The address that other machines use; one that means all of this machine's becomes its
    name.
    """
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when one of them does; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _bind_error(door: Door, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {door.port} on {door.host} is taken; choose another with --port"
    return f"cannot listen on {door.host}:{door.port}: {error.strerror}"


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
