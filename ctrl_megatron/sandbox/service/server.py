"""Runs the service until it is stopped."""

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

from ctrl_megatron.sandbox.access import is_loopback, publish_endpoints, require_safe_address
from ctrl_megatron.sandbox.jail import linux
from ctrl_megatron.sandbox.limits import IDLE_SECONDS
from ctrl_megatron.sandbox.service.connections import ConnectionListener, room_for_connections
from ctrl_megatron.sandbox.service.http import build_app, fairness_peer
from ctrl_megatron.sandbox.service.requests import STATE
from ctrl_megatron.sandbox.service.worker import WorkerSettings
from ctrl_megatron.sandbox.service.workers import WorkerPool

_OWNER_POLL_SECONDS = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where the service listens, which clients it admits, and how it ends."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 uses a free port."""
    token: str | None = None
    """Bearer token that clients must send; None admits every client but web pages."""
    allow_open: bool = False
    """Listen beyond loopback without a token."""
    drain_seconds: float = 10.0
    """Seconds for running requests to finish after the service was asked to stop."""
    endpoint_file: Path | None = None
    """File that contains the service's address while it answers."""
    owner: int = 0
    """Pid of the process that the service must not outlive, 0 for none."""
    owner_main_thread: bool = False
    """Whether the owner's main thread started the service: the kernel's parent-death signal follows
    the thread, not the process."""


async def serve_sandbox(settings: WorkerSettings, *, workers: int, options: ServerOptions) -> None:
    """Serve until SIGTERM or SIGINT, or until the owner ends.

    After the signal new work is answered 503 and running requests may finish within
    ``drain_seconds``. A second signal, or the end of the owner, ends them at once. Prints one line
    of JSON with the address and the isolation when it is ready. Raises ``OSError`` if the address
    is taken, ``UnprotectedAddress`` for an address beyond loopback without protection,
    ``IsolationRefused`` if the kernel does not provide the requested isolation.
    """
    require_safe_address(options.host, options.token, allow_open=options.allow_open)
    stop, stop_now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (stop_now if stop.is_set() else stop).set())
    watch = asyncio.create_task(_watch_owner(options, stop_now)) if options.owner else None
    pool, limits = WorkerPool(settings, workers), settings.limits
    listener = ConnectionListener(
        room_for_connections(limits.connections, workers),
        head_seconds=limits.head_seconds,
        idle_seconds=IDLE_SECONDS,
        peer_of=fairness_peer,
    )
    app = build_app(
        pool, token=options.token, loopback=is_loopback(options.host), listener=listener
    )
    state = app[STATE]
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=0.1,
        access_log=None,
        # A body must occupy what was counted for it: the bytes that arrived.
        auto_decompress=False,
        keepalive_timeout=IDLE_SECONDS,
    )
    await runner.setup()
    try:
        assert runner.server is not None
        try:
            address = await listener.listen(options.host, options.port, runner.server)
        except OSError as error:
            text = f"cannot listen on {options.host}:{options.port}: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                text = f"port {options.port} on {options.host} is taken; choose another with --port"
            raise OSError(error.errno, text) from error
        await pool.start()
        _announce(address, pool, options)
        await _first(stop.wait(), stop_now.wait())
        if not stop_now.is_set():
            if options.endpoint_file is not None:
                options.endpoint_file.unlink(missing_ok=True)
            _log.info("draining", extra={"fields": {"running": state.running_request_count}})
            await _first(state.drain(options.drain_seconds), stop_now.wait())
        _log.info("stopping", extra={"fields": {"cut_off": state.running_request_count}})
    finally:
        if watch is not None:
            watch.cancel()
        if options.endpoint_file is not None:
            options.endpoint_file.unlink(missing_ok=True)
        listener.close()
        await runner.cleanup()
        await pool.stop()


def _announce(address: tuple[str, int], pool: WorkerPool, options: ServerOptions) -> None:
    host, port = address
    if options.endpoint_file is not None:
        publish_endpoints(options.endpoint_file, [_endpoint_of(host, port)])
    note = {"host": host, "port": port, "isolation": pool.isolation, "scratch": pool.scratch}
    print(json.dumps(note), flush=True)
    _log.info("serving", extra={"fields": {**note, "workers": pool.size}})
    if missing := pool.isolation.get("missing"):
        _log.warning("isolation is not complete", extra={"fields": {"missing": missing}})


def _endpoint_of(host: str, port: int) -> str:
    """The address for other machines: a wildcard is replaced by this machine's name."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait for the first of them; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _watch_owner(options: ServerOptions, stop: asyncio.Event) -> None:
    """Stop when the owner ends, which shows as the end of stdin or as a new parent."""
    if options.owner_main_thread:
        linux.die_with_parent(options.owner, signal.SIGTERM)
    loop = asyncio.get_running_loop()

    def stdin_event() -> None:
        if not os.read(sys.stdin.fileno(), 1024):
            loop.remove_reader(sys.stdin.fileno())
            stop.set()

    loop.add_reader(sys.stdin.fileno(), stdin_event)
    while os.getppid() == options.owner:
        await asyncio.sleep(_OWNER_POLL_SECONDS)
    stop.set()
