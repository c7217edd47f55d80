"""Verdicts, remembered in memory or in a file, and shared while they are under way.

The file is SQLite's; several processes and runs may share it. It belongs on a disk of the machine:
SQLite's write-ahead log does not work over network file systems.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pydantic import ConfigDict, TypeAdapter

from ctrl_megatron.types import Verdict

Result = TypeVar("Result")

APPLICATION_ID = 0x43545243
"""In the file's header: a cache of ours."""
LAYOUT_VERSION = 1
"""In the file's header; raise it when the table or the text of a verdict changes."""
_MAGIC = b"SQLite format 3\0"
_TABLE = """CREATE TABLE results (
    number INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    value TEXT NOT NULL
)"""
_STORED = TypeAdapter(
    tuple[int, tuple[bool, ...], tuple[str, ...], bool, bool | None],
    config=ConfigDict(strict=True),
)
"""The text of a verdict: what ``encode_verdict`` writes."""


def verdict_cache(
    path: str | PathLike[str] | None = None, *, capacity: int = 200_000
) -> ResultCache[Verdict]:
    """A cache of verdicts, in memory or in the file ``path``; time-outs are not remembered, for a
    busy machine can cause them. Raises ``CacheFileError``.
    """
    store = None
    if path is not None:
        store = SqliteStore(path, encode=encode_verdict, decode=decode_verdict, capacity=capacity)
    return ResultCache(keep=lambda verdict: not verdict.timed_out, capacity=capacity, store=store)


def encode_verdict(verdict: Verdict) -> str:
    """A verdict as text."""
    return json.dumps(
        [verdict.total, verdict.passed, verdict.detail, verdict.timed_out, verdict.forged]
    )


def decode_verdict(text: str) -> Verdict:
    """What ``encode_verdict`` wrote. Raises ``ValueError`` for anything else."""
    total, passed, detail, timed_out, forged = _STORED.validate_json(text)
    if not 0 < len(passed) <= total:
        raise ValueError(f"not a verdict: {text[:100]!r}")
    return Verdict(total=total, passed=passed, detail=detail, timed_out=timed_out, forged=forged)


def fingerprint(*parts: Any) -> str:
    """A key that two values share only if their JSON forms are equal."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(slots=True)
class CacheCounters:
    """What a cache did so far."""

    hits: int = 0
    """Answered from a remembered result."""
    joined: int = 0
    """Answered by a run that another caller had already started."""
    runs: int = 0
    """Runs started."""


@dataclass(slots=True)
class _Flight(Generic[Result]):
    task: asyncio.Task[Result]
    waiters: int = 0


class Store(Protocol[Result]):
    """Where results are remembered."""

    def get(self, key: str) -> Result:
        """The result of ``key``. Raises ``KeyError`` where there is none."""
        ...

    def put(self, key: str, result: Result) -> None:
        """Remember a result; the store may forget others for it."""
        ...

    def __len__(self) -> int: ...


class MemoryStore(Generic[Result]):
    """In this process: at most ``capacity`` results, the longest unused go first."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"cache capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._results: OrderedDict[str, Result] = OrderedDict()

    def get(self, key: str) -> Result:
        """See ``Store.get``."""
        self._results.move_to_end(key)
        return self._results[key]

    def put(self, key: str, result: Result) -> None:
        """See ``Store.put``."""
        self._results[key] = result
        self._results.move_to_end(key)
        while len(self._results) > self._capacity:
            self._results.popitem(last=False)

    def __len__(self) -> int:
        return len(self._results)


class ResultCache(Generic[Result]):
    """Runs every key once: later callers get the remembered result, simultaneous ones share the
    run.

    A run that raises is not remembered; its error reaches everybody who waits for it. A cancelled
    caller leaves the run to the others, and the last one to leave cancels it. ``keep`` says which
    results may be remembered. They stay in ``store``, or in memory: then at most ``capacity``, the
    longest unused go first. It may move from one event loop to another, but only when nothing is
    under way in the former.
    """

    def __init__(
        self,
        *,
        keep: Callable[[Result], bool],
        capacity: int = 200_000,
        store: Store[Result] | None = None,
    ) -> None:
        self.counters = CacheCounters()
        self._keep = keep
        self._store: Store[Result] = MemoryStore(capacity) if store is None else store
        self._flights: dict[str, _Flight[Result]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._store)

    async def get(self, key: str, run: Callable[[], Awaitable[Result]]) -> tuple[Result, bool]:
        """The result of ``key`` and whether it came without starting ``run``."""
        self._enter_loop()
        try:
            remembered = self._store.get(key)
        except KeyError:
            pass
        else:
            self.counters.hits += 1
            return remembered, True
        flight = self._flights.get(key)
        shared = flight is not None
        if flight is None:
            self.counters.runs += 1
            flight = self._start(key, run)
        else:
            self.counters.joined += 1
        return await self._wait(key, flight), shared

    def _start(self, key: str, run: Callable[[], Awaitable[Result]]) -> _Flight[Result]:
        flight = _Flight(asyncio.ensure_future(self._run(key, run)))
        self._flights[key] = flight
        flight.task.add_done_callback(partial(self._land, key))
        return flight

    async def _wait(self, key: str, flight: _Flight[Result]) -> Result:
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                # Removed at once, so that a new caller does not join a run that is being cancelled.
                self._flights.pop(key, None)
                flight.task.cancel()

    async def _run(self, key: str, run: Callable[[], Awaitable[Result]]) -> Result:
        result = await run()
        if self._keep(result):
            # Here and not in a callback, so that a broken store's error reaches those who wait.
            self._store.put(key, result)
        return result

    def _land(self, key: str, task: asyncio.Task[Result]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
        if not task.cancelled():
            task.exception()  # known to those who wait; nobody else needs it

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._flights and self._loop is not None and self._loop.is_running():
            raise RuntimeError(
                "the reward cache is in use by another event loop; use one loop at a time"
            )
        self._flights = {}  # runs of a loop that ended under them
        self._loop = loop


class CacheFileError(ValueError):
    """The cache's file is not ours, damaged, or cannot be used. The text says what to do."""


class SqliteStore(Generic[Result]):
    """A ``Store`` in the file ``path``, which is made if it is not there.

    ``encode`` and ``decode`` turn a result to text and back; ``decode`` raises ``ValueError`` for
    a text that is none. At most ``capacity`` results stay, the oldest go first. Another process
    that writes is waited for, ``busy_seconds`` at most. Every method raises ``CacheFileError``.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        encode: Callable[[Result], str],
        decode: Callable[[str], Result],
        capacity: int = 1_000_000,
        busy_seconds: float = 30.0,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"cache capacity must be at least 1, got {capacity}")
        self.path = Path(fspath(path))
        self._encode, self._decode = encode, decode
        self._capacity = capacity
        self._connection = self._open(busy_seconds)

    def get(self, key: str) -> Result:
        """See ``Store.get``."""
        rows = self._execute("SELECT value FROM results WHERE key = ?", (key,)).fetchall()
        if not rows:
            raise KeyError(key)
        try:
            return self._decode(rows[0][0])
        except ValueError as error:
            raise self._unusable(f"holds a result that cannot be read: {error}") from error

    def put(self, key: str, result: Result) -> None:
        """See ``Store.put``; a key that is there already keeps its result."""
        row = (key, self._encode(result))
        self._execute("BEGIN IMMEDIATE")
        try:
            self._execute(
                "INSERT INTO results (key, value) VALUES (?, ?) ON CONFLICT (key) DO NOTHING", row
            )
            # A new row's number is the largest plus one: this bounds the rows without counting.
            self._execute(
                "DELETE FROM results WHERE number <= (SELECT MAX(number) FROM results) - ?",
                (self._capacity,),
            )
            self._execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.rollback()
            raise

    def __len__(self) -> int:
        return self._execute("SELECT COUNT(*) FROM results").fetchone()[0]

    def close(self) -> None:
        """Close the file; the store is of no use afterwards."""
        self._connection.close()

    def _open(self, busy_seconds: float) -> sqlite3.Connection:
        _refuse_other_files(self.path)
        try:
            connection = sqlite3.connect(
                self.path, timeout=busy_seconds, isolation_level=None, check_same_thread=False
            )
            try:
                _prepare(connection, self.path, busy_seconds)
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise self._unusable(f"cannot be opened: {error}") from error
        return connection

    def _execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._connection.execute(statement, values)
        except sqlite3.Error as error:
            raise self._unusable(f"cannot be used: {error}") from error

    def _unusable(self, why: str) -> CacheFileError:
        return CacheFileError(_advice(self.path, why))


def _refuse_other_files(path: Path) -> None:
    """Before SQLite touches it, and would make something of it."""
    if not path.parent.is_dir():
        raise CacheFileError(f"{path}: the folder {path.parent} does not exist; create it")
    try:
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
    except FileNotFoundError:
        return
    except OSError as error:
        raise CacheFileError(_advice(path, f"cannot be read: {error}")) from error
    if start and start != _MAGIC:
        raise CacheFileError(_advice(path, "is not a cache of verdicts"))


def _prepare(connection: sqlite3.Connection, path: Path, busy_seconds: float) -> None:
    connection.execute("BEGIN")  # one moment of the file, while another process may be making it
    ours = _is_ours(connection, path)
    connection.execute("COMMIT")
    if not ours:
        _enter_wal(connection, path, busy_seconds)
        connection.execute("BEGIN IMMEDIATE")
        # Another process may have been first.
        if not _is_ours(connection, path):
            connection.execute(_TABLE)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {LAYOUT_VERSION}")
        connection.execute("COMMIT")
    _enter_wal(connection, path, busy_seconds)
    # A power cut may lose the newest results, never the file.
    connection.execute("PRAGMA synchronous = NORMAL")
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise CacheFileError(_advice(path, f"is damaged: {found}"))


def _is_ours(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file is a cache of ours; False for an empty one. Raises for somebody else's.

    Inside a transaction, so that its three questions are about the same state.
    """
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application == APPLICATION_ID:
        if version != LAYOUT_VERSION:
            raise CacheFileError(
                _advice(path, f"has layout {version}, this release reads {LAYOUT_VERSION}")
            )
        return True
    tables = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
    if application or version or tables:
        raise CacheFileError(_advice(path, "is a database of another program"))
    return False


def _enter_wal(connection: sqlite3.Connection, path: Path, busy_seconds: float) -> None:
    deadline = time.monotonic() + busy_seconds
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            break
        except sqlite3.OperationalError as error:
            # SQLite does not wait here when two processes switch at the same time.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    if mode != "wal":
        raise CacheFileError(
            _advice(path, f"lies where SQLite's write-ahead log does not work (mode {mode!r})")
        )


def _advice(path: Path, why: str) -> str:
    return f"cache file {path} {why}; name another file, or delete it if its verdicts may go"
