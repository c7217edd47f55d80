"""One worker process: starts and isolates it, runs one job at a time on it, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from ctrl_megatron.sandbox.jail import files, frames
from ctrl_megatron.sandbox.jail.isolation import IsolationRefused
from ctrl_megatron.sandbox.jail.job import Job, JobReport
from ctrl_megatron.sandbox.limits import Level, SandboxLimits
from ctrl_megatron.sandbox.service.cgroups import CgroupSubtree

_log = logging.getLogger(__name__)

PROCESS_MARK = "sandbox-of-"
"""Marks every process of a worker in its command line, followed by the service's pid."""
_FIRST_UID, _UID_BLOCKS, _UIDS_PER_SERVICE = 20_001, 256, 128
_START_SECONDS, _END_SECONDS = 60.0, 2.0
_CANCEL_SECONDS = 5.0
SCRATCH_MODE = 0o711
_ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""The whole environment of a worker. With one hash seed, sets of texts have the same order on all
workers, so that equal programs get equal verdicts. A worker clears the environment before its first
job."""
_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); "
    "from ctrl_megatron.sandbox.jail.zygote import main; main({fd})"
)


class WorkerFault(RuntimeError):
    """A worker failed; the program that it ran is not to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings with which workers are started."""

    level: Level
    limits: SandboxLimits
    python: str = os.path.realpath(sys.executable)
    """The interpreter that runs programs; only its standard library is used."""
    preload: tuple[str, ...] = ()
    """Further modules that each worker imports once."""
    without: tuple[str, ...] = ()
    """Mechanisms that are not tried: ``namespaces``, ``seccomp``, ``landlock``."""


@dataclass(slots=True, eq=False)
class SandboxWorker:
    """One worker process."""

    _process: subprocess.Popen[bytes]
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _folders: tuple[str, ...] = ()
    """The worker's directories, below the pool's scratch directory."""
    _answer: asyncio.Task[dict[str, Any]] | None = None
    """Reads the next answer."""
    isolation: dict[str, Any] = field(default_factory=dict)
    """The isolation that the worker reached; empty before it is ready."""

    @classmethod
    async def start(
        cls,
        settings: WorkerSettings,
        scratch: str,
        number: int,
        cgroups: CgroupSubtree | None = None,
    ) -> SandboxWorker:
        """Start and isolate a worker. Raises ``IsolationRefused``, ``WorkerFault`` or
        ``OSError``.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            root = str(Path(__file__).resolve().parents[3])
            boot = _BOOT.format(root=root, fd=theirs.fileno())
            process = subprocess.Popen(
                [
                    *(settings.python, "-s", "-P", "-S", "-B", "-X", "utf8", "-c", boot),
                    f"{PROCESS_MARK}{os.getpid()}",
                ],
                env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = cls(process, reader, writer)
        try:
            if cgroups is not None:
                # Moved before it starts any process, so that all of them are in the cgroup.
                cgroups.confine(number, process.pid, settings.limits)
            await worker._introduce(settings, scratch, number)
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def run(self, job: Job, seconds: float) -> JobReport:
        """Run one job. Raises ``WorkerFault``; the worker must be stopped then."""
        message = await self._ask(job, seconds)
        if message["kind"] != "end":
            raise WorkerFault(message.get("reason", "a worker sent an unknown message"))
        return cast("JobReport", message)

    def request_cancel(self) -> None:
        """Cancel the running job: its report arrives at once, with ``stopped`` ``cancelled``."""
        self._writer.write(frames.encode_frame(None))

    async def cancel(self) -> None:
        """Cancel the job after its ``run`` was cancelled, and wait for its report. Raises
        ``WorkerFault``.
        """
        assert self._answer is not None
        self.request_cancel()
        await self._arrived(_CANCEL_SECONDS)

    async def stop(self) -> None:
        """End the worker and its job; kill it if it does not end in time."""
        if self._answer is not None:
            self._answer.cancel()
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for folder in self._folders:
            try:
                # An unconfined program of the same user may have changed the directory's mode.
                os.chmod(os.path.dirname(folder), SCRATCH_MODE)
                files.remove_tree(folder)
            except OSError as error:
                # The worker has ended anyway, and its place is needed.
                _log.warning("%s of an ended worker was not removed: %s", folder, error)

    async def _introduce(self, settings: WorkerSettings, scratch: str, number: int) -> None:
        self._folders = staging, private = (
            tempfile.mkdtemp(dir=scratch, prefix=f"{number}-"),
            tempfile.mkdtemp(dir=scratch, prefix=f"{number}-"),
        )
        setup = {
            "service_pid": os.getpid(),
            "level": settings.level,
            "staging": staging,
            "scratch": private,
            "user": _user(number) if os.getuid() == 0 else None,
            "without": settings.without,
            "preload": settings.preload,
            "limits": asdict(settings.limits),
        }
        answer = await self._ask(setup, _START_SECONDS)
        if answer["kind"] != "ready":
            raise IsolationRefused(answer["reason"])
        self.isolation = answer["isolation"]

    async def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        self._writer.write(frames.encode_frame(message))
        # A separate task: if the caller is cancelled, no partial answer may stay in the stream.
        self._answer = asyncio.create_task(self._read())
        return await self._arrived(seconds)

    async def _read(self) -> dict[str, Any]:
        await self._writer.drain()
        (size,) = frames.HEADER.unpack(await self._reader.readexactly(frames.HEADER.size))
        return json.loads(await self._reader.readexactly(size))

    async def _arrived(self, seconds: float) -> dict[str, Any]:
        assert self._answer is not None
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(self._answer)
        except TimeoutError as error:
            raise WorkerFault(f"a worker did not answer within {seconds:.0f} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerFault("a worker died") from error


def _user(number: int) -> int:
    """The user id of a worker that root starts. Workers get different ids (below 65,536), because
    limits on processes and leftover files are per user.
    """
    block = os.getpid() % _UID_BLOCKS
    return _FIRST_UID + block * _UIDS_PER_SERVICE + number % _UIDS_PER_SERVICE
