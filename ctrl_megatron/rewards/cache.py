"""A cache of results, in memory or in a file: verdicts, and other results that cost time or money.
Callers that request a result while it is computed share the run.

The file is an SQLite database that several processes and runs may share. It must be on a local
disk: SQLite's write-ahead log does not work on network file systems.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Generic, TypeVar

from ctrl_megatron.errors import UserError
from ctrl_megatron.types import Verdict

APPLICATION_ID = 0x43545243
"""SQLite's application id of a cache of verdicts, in the file's header."""
LAYOUT_VERSION = 4
"""Version in the file's header. Raise it when the table or the text of a verdict changes."""
T = TypeVar("T")
_TABLE = """CREATE TABLE results (
    number INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    value TEXT NOT NULL
)"""


_PAGE_BYTES = 4096
_DROPPED_SHARE = 8
"""One eighth of the verdicts, the oldest, is deleted when the file is too large."""


def encode_verdict(verdict: Verdict) -> str:
    return json.dumps(astuple(verdict))


def decode_verdict(text: str) -> Verdict:
    """The verdict that ``encode_verdict`` wrote. Raises ``UserError`` for any other text."""
    try:
        passed, total, detail, timed_out, scores, tests, unjudgeable = json.loads(text)
        sound = type(total) is int and 0 < len(passed) <= total
        sound = sound and all(type(flag) is bool for flag in (*passed, timed_out, unjudgeable))
        sound = sound and all(type(entry) is str for entry in (*detail, *tests))
        sound = sound and all(type(score) in (int, float) for score in scores)
    except (TypeError, ValueError) as error:
        raise UserError(f"not a verdict: {text[:100]!r}") from error
    if not sound:
        raise UserError(f"not a verdict: {text[:100]!r}")
    return Verdict(
        total=total,
        passed=tuple(passed),
        detail=tuple(detail),
        timed_out=timed_out,
        scores=tuple(scores),
        tests=tuple(tests),
        unjudgeable=unjudgeable,
    )


def json_fingerprint(*parts: Any) -> str:
    """SHA-256 of the JSON form of ``parts``: equal only for equal JSON forms."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()


class CacheFileError(ValueError):
    """The cache's file belongs to another program, is damaged, or cannot be opened."""


@dataclass(slots=True)
class CacheCounters:
    """Counts of what a cache did."""

    hits: int = 0
    """Requests that a stored verdict answered."""
    joined: int = 0
    """Requests that a run of another caller answered."""
    runs: int = 0
    """Runs that were started."""


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class ResultCache(Generic[T]):
    """Runs every key once: later callers get the stored result, and callers at the same time share
    one run.

    The error of a run reaches all callers that wait for it and is not stored. A cancelled caller
    leaves the run to the others; the last one cancels it. The results for which ``keeps`` is true
    are stored as the text that ``encode`` makes of them and ``decode`` reads, in memory or in the
    SQLite file ``path``, which is created where it does not exist and has the id ``application``
    and the version ``layout`` in its header: at most ``capacity`` results and
    ``capacity_bytes`` bytes, the oldest are deleted first. A method waits up to ``busy_seconds``
    for another process that writes to the file. The cache may change to another event loop while
    nothing runs on the former one. Every method raises ``CacheFileError``.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        encode: Callable[[T], str],
        decode: Callable[[str], T],
        keeps: Callable[[T], bool],
        application: int,
        layout: int,
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
        self._encode, self._decode, self._keeps = encode, decode, keeps
        self._application, self._layout = application, layout
        self._flights: dict[str, _Flight[T]] = {}
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

    async def get_or_run(self, key: str, run: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """The result of ``key``, and True where ``run`` was not started for it."""
        self._enter_loop()
        remembered = self.get_stored(key)
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
            # The run is done or has no caller left: a new caller must not join it.
            if flight.task.done() or flight.waiters == 0:
                flight.task.cancel()
                if self._flights.get(key) is flight:
                    del self._flights[key]

    def get_stored(self, key: str) -> T | None:
        with self._refusing("be used"):
            row = self._connection.execute(
                "SELECT value FROM results WHERE key = ?", (key,)
            ).fetchone()
        try:
            return None if row is None else self._decode(row[0])
        except ValueError as error:
            raise self._unusable(f"contains a result that cannot be read: {error}") from error

    def store(self, key: str, result: T) -> None:
        """Store a result. A key that is stored already keeps its result."""
        with self._refusing("be used"), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute(
                "INSERT INTO results (key, value) VALUES (?, ?) ON CONFLICT (key) DO NOTHING",
                (key, self._encode(result)),
            )
            # A new row has the largest number plus one, so no count of the rows is needed.
            self._connection.execute(
                "DELETE FROM results WHERE number <= (SELECT MAX(number) FROM results) - ?",
                (self._capacity,),
            )
            if self._used_pages() > self._pages:
                # Many at once, because every deletion reads the oldest rows.
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
        """Close the file. No other method may be called afterwards."""
        self._connection.close()

    async def _run(self, key: str, run: Callable[[], Awaitable[T]]) -> T:
        result = await run()
        if self._keeps(result):
            # Stored here and not in a callback, so that an error of the file reaches the callers.
            self.store(key, result)
        return result

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._flights and self._loop is not None and self._loop.is_running():
            raise RuntimeError(
                "the cache is in use by another event loop; use it on one event loop only"
            )
        self._flights = {}  # the loop of the old runs has ended
        self._loop = loop

    def _prepare(self) -> None:
        execute = self._connection.execute
        execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        with self._connection:
            execute("BEGIN IMMEDIATE")  # another process may create the file now
            if not self._is_ours():
                execute(_TABLE)
                execute(f"PRAGMA application_id = {self._application}")
                execute(f"PRAGMA user_version = {self._layout}")
        if self.path is None:
            return
        self._enter_wal()
        # A power cut may lose the newest results, never the file.
        execute("PRAGMA synchronous = NORMAL")
        answer = execute("PRAGMA quick_check(1)").fetchone()[0]
        if answer != "ok":
            raise self._unusable(f"is damaged: {answer}")

    def _is_ours(self) -> bool:
        """True for a cache, False for an empty file. Raises for a file of another program."""
        queries = (
            "PRAGMA application_id",
            "PRAGMA user_version",
            "SELECT COUNT(*) FROM sqlite_master",
        )
        application, version, tables = (
            self._connection.execute(query).fetchone()[0] for query in queries
        )
        if application == self._application and version != self._layout:
            raise self._unusable(f"has layout {version}, this release reads {self._layout}")
        if application != self._application and (application or version or tables):
            raise self._unusable("is a database of another program")
        return application == self._application

    def _enter_wal(self) -> None:
        deadline = time.monotonic() + self._busy_seconds
        while True:
            try:
                mode = self._connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
                break
            except sqlite3.OperationalError as error:
                # SQLite does not wait where two processes switch the mode at the same time.
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        if mode != "wal":
            raise self._unusable(
                f"is on a file system without support for SQLite's write-ahead log (mode {mode!r})"
            )

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._unusable(f"cannot {what}: {error}") from error

    def _unusable(self, why: str) -> CacheFileError:
        return CacheFileError(
            f"cache file {self.path} {why}; name another file, or delete it "
            "if its results are not needed"
        )


class VerdictCache(ResultCache[Verdict]):
    """A ``ResultCache`` of verdicts. Those with a time-out are not stored, because a busy machine
    can cause them.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        normalised: bool = False,
        capacity: int = 200_000,
        capacity_bytes: int = 512 << 20,
        busy_seconds: float = 30.0,
    ) -> None:
        super().__init__(
            path,
            encode=encode_verdict,
            decode=decode_verdict,
            keeps=lambda verdict: not verdict.timed_out,
            application=APPLICATION_ID,
            layout=LAYOUT_VERSION,
            capacity=capacity,
            capacity_bytes=capacity_bytes,
            busy_seconds=busy_seconds,
        )
        self.normalised = normalised
        """Whether programs with one normal form share a verdict (``grading.CachedJudge``)."""
