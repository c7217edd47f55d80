"""The directory of a run: who wrote it, and the lock of the run that writes to it now."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ctrl_megatron.config.flags import require_writable
from ctrl_megatron.errors import UserError, users_input

LOCK_FILE, MARKER_FILE = "run.lock", ".ctrl_megatron_run"
_WRITTEN = (
    *("config.yaml", "metrics.jsonl", "timeline.jsonl", "examples.jsonl", "warnings.jsonl"),
    *("summary.json", "report.html", "checkpoints", "hf", "hf_exports", "engine.log"),
    *("tensorboard", "dumps", "profile"),
)
_BEAT_SECONDS = 5.0
_SEEN_SECONDS = 90.0
"""Longest time until other hosts see a new file: NFS caches for a minute that it does not exist."""
_SILENT_SECONDS = 20.0
"""Time without renewal after which the lock of a run on another host counts as abandoned."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that owns a lock."""

    host: str
    pid: int
    started: float
    """Start of the process, in seconds since the epoch, because process ids are reused."""

    def lives(self, lock: Path) -> bool:
        """Whether the process still runs or, on another host, whether it renews the lock."""
        if self.host == socket.gethostname():
            try:
                holder = psutil.Process(self.pid)
                same = abs(holder.create_time() - self.started) < 2
                # A process that has ended keeps its entry until its parent reads the exit code.
                return same and holder.status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return False
        return _renewed(lock)


class RunLock:
    """The first rank's lock from ``take`` to ``release``, renewed for readers on other hosts."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK_FILE
        self.holder = Holder(socket.gethostname(), os.getpid(), psutil.Process().create_time())
        self._released = threading.Event()

    def take(self) -> RunLock:
        """Acquire the lock. UserError if another run has it, or for files of other programs."""
        directory = self._path.parent
        if not directory.is_dir():
            check_run_directory(directory)
            directory.mkdir(parents=True, exist_ok=True)
        # Once, because checking a lock of another host takes up to 20 s.
        with _alone(directory):
            check_run_directory(directory)
            work = self._path.with_name(f".{LOCK_FILE}.{os.getpid()}")
            work.write_text(json.dumps(asdict(self.holder)) + "\n")
            os.replace(work, self._path)
            (directory / MARKER_FILE).touch()
        threading.Thread(target=self._renew, name="run-lock", daemon=True).start()
        return self

    def release(self) -> None:
        """Remove the lock, if this process still owns it."""
        self._released.set()
        if _holder(self._path) == self.holder:
            self._path.unlink()

    def _renew(self) -> None:
        while not self._released.wait(_BEAT_SECONDS):
            try:
                os.utime(self._path)
            except OSError:
                return  # the lock was removed


def require_shared(directory: Path, holder: Holder, seconds: float = _SEEN_SECONDS) -> None:
    """UserError if this rank does not see the lock of ``holder``, another rank: then the hosts have
    different directories of this name, and a checkpoint would be scattered over them.
    """
    deadline = time.monotonic() + seconds
    while _holder(directory / LOCK_FILE) != holder:
        if time.monotonic() > deadline:
            raise UserError(
                f"{directory} on {socket.gethostname()} is not the directory of this name on "
                f"{holder.host}, where the run writes",
                key="trainer.default_local_dir",
                remedy="name one on a file system that all machines share",
            )
        time.sleep(0.5)


def check_run_directory(directory: Path, key: str = "trainer.default_local_dir") -> None:
    """UserError if a run cannot write to ``directory``: another run does, it has files of other
    programs, or the system refuses. ``key`` names the directory in messages. Writes nothing.
    """
    with users_input(key):
        require_writable(directory)
    if not directory.is_dir():
        if directory.exists():
            raise UserError(f"{directory} is no directory", key=key)
        return
    holder = _holder(directory / LOCK_FILE)
    if holder is not None and holder.lives(directory / LOCK_FILE):
        raise UserError(
            f"{directory} is in use by the run with pid {holder.pid} on {holder.host}",
            remedy="wait for it, or give this run another trainer.experiment_name",
        )
    if not _is_ours(directory):
        foreign = next((name for name in _WRITTEN if (directory / name).exists()), None)
        if foreign is not None:
            raise UserError(
                f"{directory / foreign} was not written by a run and would be replaced",
                remedy="give this run another trainer.experiment_name",
            )


def _is_ours(directory: Path) -> bool:
    if (directory / MARKER_FILE).exists() or (directory / LOCK_FILE).exists():
        return True
    try:
        return "actor_rollout_ref:" in (directory / "config.yaml").read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _holder(lock: Path) -> Holder | None:
    """The owner in the lock file; None without a file, or if it is incomplete."""
    try:
        return Holder(**json.loads(lock.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _renewed(lock: Path) -> bool:
    """Whether the file is renewed within 20 s; the hosts' clocks need not agree."""
    try:
        before, deadline = lock.stat().st_mtime_ns, time.monotonic() + _SILENT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.5)
            if lock.stat().st_mtime_ns != before:
                return True
    except FileNotFoundError:
        return False
    return False


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Let two runs of one host that start together acquire the lock one after the other."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
