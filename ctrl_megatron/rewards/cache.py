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
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ctrl_megatron.errors import UserError
from ctrl_megatron.types import Verdict

APPLICATION_ID = 0x43545243
"""In the file's header: a cache of ours."""
LAYOUT_VERSION = 2
"""In the file's header; raise it when the table or the text of a verdict changes."""
_TABLE = """CREATE TABLE results (
    number INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    value TEXT NOT NULL
)"""


_PAGE_BYTES = 4096
_DROPPED_SHARE = 8
"""One of so many verdicts goes when there are too many bytes of them."""


def encode_verdict(verdict: Verdict) -> str:
    """A verdict as text."""
    return json.dumps([verdict.total, verdict.passed, verdict.detail, verdict.timed_out])


def decode_verdict(text: str) -> Verdict:
    """What ``encode_verdict`` wrote. Raises ``ValueError`` for anything else."""
    try:
        total, passed, detail, timed_out = json.loads(text)
        sound = type(total) is int and 0 < len(passed) <= total
        sound = sound and all(type(flag) is bool for flag in (*passed, timed_out))
        sound = sound and all(type(entry) is str for entry in detail)
    except (TypeError, ValueError) as error:
        raise UserError(f"not a verdict: {text[:100]!r}") from error
    if not sound:
        raise UserError(f"not a verdict: {text[:100]!r}")
    return Verdict(total=total, passed=tuple(passed), detail=tuple(detail), timed_out=timed_out)


def fingerprint(*parts: Any) -> str:
    """A key that two values share only if their JSON forms are equal."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()


class CacheFileError(ValueError):
    """The cache's file is not ours, damaged, or cannot be used. The text says what to do."""


@dataclass(slots=True)
class CacheCounters:
    """What a cache did so far."""

    hits: int = 0
    """Answered from a remembered verdict."""
    joined: int = 0
    """Answered by a run that another caller had already started."""
    runs: int = 0
    """Runs started."""


@dataclass(slots=True)
class _Flight:
    task: asyncio.Task[Verdict]
    waiters: int = 0


class VerdictCache:
    """Runs every key once: later callers get the remembered verdict, simultaneous ones share the
    run.

    A run that raises is not remembered; its error reaches everybody who waits for it. A cancelled
    caller leaves the run to the others, and the last one to leave cancels it. Time-outs are not
    remembered either, for a busy machine can cause them. Verdicts stay in memory, or in the SQLite
    file ``path``, which is made if it is not there: at most ``capacity`` of them and
    ``capacity_bytes`` in all, the oldest go first.
    Another process that writes to the file is waited for, ``busy_seconds`` at most. The cache may
    move from one event loop to another, but only when nothing is under way in the former. Every
    method raises ``CacheFileError``.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        capacity: int = 200_000,
        capacity_bytes: int = 512 << 20,
        busy_seconds: float = 30.0,
    ) -> None:
        if capacity < 1:
            raise UserError(f"cache capacity must be at least 1, got {capacity}")
        if capacity_bytes < _PAGE_BYTES * 64:
            raise UserError(f"cache capacity_bytes must be at least {_PAGE_BYTES * 64}")
        self.path = None if path is None else Path(path)
        self.counters = CacheCounters()
        self._capacity, self._busy_seconds = capacity, busy_seconds
        self._pages = capacity_bytes // _PAGE_BYTES
        self._flights: dict[str, _Flight] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        if self.path is not None and not self.path.parent.is_dir():
            raise CacheFileError(f"{path}: the folder {self.path.parent} does not exist; create it")
        with self._refusing("be opened"):
            self._connection = sqlite3.connect(
                ":memory:" if self.path is None else self.path,
                timeout=busy_seconds,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    async def get(self, key: str, run: Callable[[], Awaitable[Verdict]]) -> tuple[Verdict, bool]:
        """The verdict of ``key`` and whether it came without starting ``run``."""
        self._enter_loop()
        remembered = self.recall(key)
        if remembered is not None:
            self.counters.hits += 1
            return remembered, True
        flight = self._flights.get(key)
        shared = flight is not None
        if flight is None:
            self.counters.runs += 1
            flight = _Flight(asyncio.ensure_future(self._run(key, run)))
            self._flights[key] = flight
        else:
            self.counters.joined += 1
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task), shared
        finally:
            flight.waiters -= 1
            # Done, or given up by everybody: a new caller must not join it.
            if flight.task.done() or flight.waiters == 0:
                flight.task.cancel()
                if self._flights.get(key) is flight:
                    del self._flights[key]

    def recall(self, key: str) -> Verdict | None:
        """The remembered verdict of ``key``."""
        with self._refusing("be used"):
            row = self._connection.execute(
                "SELECT value FROM results WHERE key = ?", (key,)
            ).fetchone()
        try:
            return None if row is None else decode_verdict(row[0])
        except ValueError as error:
            raise self._unusable(f"holds a result that cannot be read: {error}") from error

    def remember(self, key: str, verdict: Verdict) -> None:
        """Keep a verdict; a key that is there already keeps its own."""
        with self._refusing("be used"), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute(
                "INSERT INTO results (key, value) VALUES (?, ?) ON CONFLICT (key) DO NOTHING",
                (key, encode_verdict(verdict)),
            )
            # A new row's number is the largest plus one: this bounds the rows without counting.
            self._connection.execute(
                "DELETE FROM results WHERE number <= (SELECT MAX(number) FROM results) - ?",
                (self._capacity,),
            )
            if self._used_pages() > self._pages:
                # Many at once: it takes a look at the oldest, whatever their number.
                self._connection.execute(
                    "DELETE FROM results WHERE number <= (SELECT MIN(number) + "
                    "(MAX(number) - MIN(number)) / ? FROM results)",
                    (_DROPPED_SHARE,),
                )

    def _used_pages(self) -> int:
        pages, free = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count")
        )
        return pages - free

    def __len__(self) -> int:
        with self._refusing("be used"):
            return self._connection.execute("SELECT COUNT(*) FROM results").fetchone()[0]

    def close(self) -> None:
        """Close the file; the cache is of no use afterwards."""
        self._connection.close()

    async def _run(self, key: str, run: Callable[[], Awaitable[Verdict]]) -> Verdict:
        verdict = await run()
        if not verdict.timed_out:
            # Here and not in a callback, so that a broken file's error reaches those who wait.
            self.remember(key, verdict)
        return verdict

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

    def _prepare(self) -> None:
        execute = self._connection.execute
        execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        with self._connection:
            execute("BEGIN IMMEDIATE")  # other processes may be making the file
            if not self._is_ours():
                execute(_TABLE)
                execute(f"PRAGMA application_id = {APPLICATION_ID}")
                execute(f"PRAGMA user_version = {LAYOUT_VERSION}")
        if self.path is None:
            return
        self._enter_wal()
        # A power cut may lose the newest results, never the file.
        execute("PRAGMA synchronous = NORMAL")
        answer = execute("PRAGMA quick_check(1)").fetchone()[0]
        if answer != "ok":
            raise self._unusable(f"is damaged: {answer}")

    def _is_ours(self) -> bool:
        """Whether it is a cache of ours; False for an empty file. Raises for somebody else's."""
        queries = (
            "PRAGMA application_id",
            "PRAGMA user_version",
            "SELECT COUNT(*) FROM sqlite_master",
        )
        application, version, tables = (
            self._connection.execute(query).fetchone()[0] for query in queries
        )
        if application == APPLICATION_ID and version != LAYOUT_VERSION:
            raise self._unusable(f"has layout {version}, this release reads {LAYOUT_VERSION}")
        if application != APPLICATION_ID and (application or version or tables):
            raise self._unusable("is a database of another program")
        return application == APPLICATION_ID

    def _enter_wal(self) -> None:
        deadline = time.monotonic() + self._busy_seconds
        while True:
            try:
                mode = self._connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
                break
            except sqlite3.OperationalError as error:
                # SQLite does not wait here when two processes switch at the same time.
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        if mode != "wal":
            raise self._unusable(
                f"lies where SQLite's write-ahead log does not work (mode {mode!r})"
            )

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._unusable(f"cannot {what}: {error}") from error

    def _unusable(self, why: str) -> CacheFileError:
        return CacheFileError(
            f"cache file {self.path} {why}; name another file, or delete it if its verdicts may go"
        )
