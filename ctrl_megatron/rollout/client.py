"""``Engine`` over HTTP: the client of an engine in another process, also on another host."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from ctrl_megatron.parallel.hosts import host_identity
from ctrl_megatron.parallel.parent_watch import process_gone
from ctrl_megatron.rollout import wire
from ctrl_megatron.rollout.counters import Counters
from ctrl_megatron.rollout.engine import (
    CompletionListener,
    EngineAddress,
    EngineDied,
    EngineMemory,
    PauseMode,
    SleepLevel,
    TokenListener,
)
from ctrl_megatron.rollout.weight_chunks import WeightChunk
from ctrl_megatron.types import Completion, SamplingParams, TensorSpec

_EXIT_GRACE = 3.0
_LONGEST_LINE = 2**26


def log_tail(path: str) -> str:
    """The end of the log at ``path``, at most 3000 bytes of it; a text that says so if there is
    none."""
    file = Path(path)
    if not file.is_file():
        return f"(no log at {path})"
    with file.open("rb") as handle:
        handle.seek(max(0, file.stat().st_size - 3000))
        return handle.read().decode(errors="replace")


def describe_exit(code: int) -> str:
    """A sentence's end for ``Popen.returncode``: was killed by SIGKILL, exited with code 1."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def engine_died_error(address: EngineAddress, what: str) -> EngineDied:
    """The error that says ``what`` happened to the engine, with the end of its log."""
    return EngineDied(
        f"engine {address.name} (pid {address.pid}) {what}; the end of its log "
        f"{address.log_path}:\n{log_tail(address.log_path)}"
    )


class LaunchedEngine(Protocol):
    """The engine's process, as its launcher has it."""

    @property
    def address(self) -> EngineAddress:
        """The present address: a process that is launched again has another id."""
        ...

    def exit_code(self) -> int | None:
        """None while it runs."""
        ...


class RemoteEngine:
    """``Engine`` at an address. It belongs to the event loop of its first call, in any thread.

    Connection errors become EngineDied with the engine's name, process id, exit and last log lines.
    ``launched`` is the engine's process where it is known: in its launcher.
    """

    def __init__(self, address: EngineAddress, launched: LaunchedEngine | None = None) -> None:
        self._address, self._launched = address, launched
        self._session: aiohttp.ClientSession | None = None

    @property
    def address(self) -> EngineAddress:
        """The address of the engine, of which host, port and token never change."""
        return self._address if self._launched is None else self._launched.address

    async def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        listener: TokenListener | None = None,
        *,
        finished: CompletionListener | None = None,
    ) -> list[list[Completion]]:
        body = {"prompts": prompts, "params": asdict(params)}
        if listener is None and finished is None:
            groups = await self._post("/generate", body)
            return [[wire.completion_from_json(c) for c in group] for group in groups]
        done: dict[int, Completion] = {}

        def take(place: int, completion: list[Any]) -> None:
            done[place] = wire.completion_from_json(completion)
            if finished is not None:
                finished(place, done[place])

        shows: dict[str, Callable[..., None]] = {"finished": take}
        if listener is not None:
            shows["tokens"] = listener
        await self._stream({**body, "tokens": listener is not None}, shows)
        every = [done[place] for place in range(len(prompts) * params.n)]
        return params.group_by_prompt(every)

    async def update(
        self, specs: Sequence[TensorSpec], chunks: AsyncIterator[WeightChunk], version: str
    ) -> None:
        """An error raised by ``chunks`` fails the update and is raised here."""
        try:
            async with self._open().ws_connect(
                self.address.endpoint + "/update", max_msg_size=0
            ) as socket:
                await socket.send_json(
                    {"specs": [asdict(spec) for spec in specs], "version": version}
                )
                # The server requests each chunk when the engine has read the one before.
                while (answer := await _receive(socket)) == {"next": True}:
                    try:
                        chunk = await anext(chunks, None)
                    except BaseException as error:
                        await socket.send_json({"failed": f"{type(error).__name__}: {error}"})
                        # The engine has given the update up when it answers.
                        await socket.receive()
                        raise
                    await socket.send_json({"chunk": chunk})
        except (aiohttp.ClientError, OSError) as error:
            raise await self._died(error) from error
        if "error" in answer:
            raise wire.error_from_json(answer["error"])

    async def pause(self, mode: PauseMode) -> None:
        await self._post("/pause", {"mode": mode})

    async def resume(self) -> None:
        await self._post("/resume", {})

    async def sleep(self, level: SleepLevel) -> None:
        await self._post("/sleep", {"level": level})

    async def wake(self, tags: Sequence[EngineMemory]) -> None:
        await self._post("/wake", {"tags": list(tags)})

    async def checksums(self) -> dict[str, str]:
        return await self._post("/checksums", {})

    async def token_log_probs(self, tokens: list[int]) -> list[list[float]]:
        return await self._post("/log_probs", {"tokens": tokens})

    async def health(self) -> None:
        await self._post("/health", {})

    async def process_identity(self) -> str:
        """What tells the engine's process from those that are started in its place."""
        return await self._post("/process", {})

    async def counters(self) -> dict[str, Counters]:
        return {self.address.name: await self._post("/counters", {})}

    async def close(self) -> None:
        """Close the connections; the engine continues (``EngineProcess.stop`` ends it)."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Unlimited: a pause must never queue behind running generations.
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
                headers={"Authorization": f"Bearer {self.address.token}"},
            )
        return self._session

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._asked(path, body) as response:
            data = _read(await response.read())
        return _result(data)

    async def _stream(self, body: dict[str, Any], shows: Mapping[str, Callable[..., None]]) -> None:
        """Call the entry of ``shows`` that an event names with what the event contains."""
        data: wire.Json = {}
        async with self._asked("/stream", body) as response:
            async for line in response.content:
                data = _read(line)
                for name in data.keys() & shows.keys():
                    shows[name](*data[name])
        _result(data)

    @asynccontextmanager
    async def _asked(
        self, path: str, body: dict[str, Any]
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        url = self.address.endpoint + path
        try:
            async with self._open().post(url, json=body, read_bufsize=_LONGEST_LINE) as response:
                if response.status not in (200, 500):
                    raise ValueError(
                        f"{self.address.name} refused {path} with status {response.status}; is the "
                        "address the one of this launch?"
                    )
                yield response
        except (aiohttp.ClientError, OSError) as error:
            raise await self._died(error) from error

    async def _died(self, error: BaseException) -> EngineDied:
        """The error for a failed connection, with everything that is known about the process."""
        address, deadline = self.address, time.monotonic() + _EXIT_GRACE
        what = f"{type(error).__name__}: {error}"
        if address.home != host_identity():
            return engine_died_error(address, f"is not reached from {os.uname().nodename} ({what})")
        # The process that launched the engine gets its exit code once it has reaped it.
        while not (gone := process_gone(address.pid)) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        code = None if self._launched is None else self._launched.exit_code()
        if code is not None:
            ending = describe_exit(code)
        elif gone:
            ending = "is gone"
        else:
            ending = f"still runs but does not answer ({what})"
        return engine_died_error(address, f"{ending} (seen from pid {os.getpid()})")


def _read(data: bytes) -> wire.Json:
    try:
        return json.loads(data)
    except ValueError as error:
        said = data[:200].decode(errors="replace")
        raise aiohttp.ClientPayloadError(f"an answer that is no JSON: {said!r}") from error


def _result(data: wire.Json) -> Any:
    if "error" in data:
        raise wire.error_from_json(data["error"])
    return data["result"]


async def _receive(socket: aiohttp.ClientWebSocketResponse) -> wire.Json:
    message = await socket.receive()
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise aiohttp.ClientConnectionError("connection closed during a weight update")
    return message.json()
