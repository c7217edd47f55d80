"""The directory of a run: who wrote it, and the lock of the run that writes to it now."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ctrl_megatron.checkpoint.files import write_text_atomically
from ctrl_megatron.config.flags import require_writable
from ctrl_megatron.errors import UserError, convert_input_errors
from ctrl_megatron.parallel.parent_watch import process_start_ticks

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
class LockHolder:
    """The process that owns a lock. No clock that can be set is part of it."""

    host: str
    boot: str
    """Identity of the host's last boot."""
    pid: int
    started: int
    """Clock ticks from the boot to the start of the process, because process ids are reused."""

    @staticmethod
    def this_process() -> LockHolder:
        pid = os.getpid()
        return LockHolder(socket.gethostname(), _boot(), pid, process_start_ticks(pid) or 0)

    def is_alive(self, lock: Path) -> bool:
        """Whether the process still runs or, on another host, whether it renews the lock.

        A container with process ids of its own shares the boot of its host: there, the lock of the
        kernel decides.
        """
        if self.boot != _boot():
            return _renewed(lock)
        return process_start_ticks(self.pid) == self.started or _is_locked(lock)


class RunLock:
    """The first rank's lock from ``acquire`` to ``release``, renewed for readers on other hosts."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._file = run_dir / LOCK_FILE, -1
        self.holder = LockHolder.this_process()
        self._ended = threading.Event()
        self._lost: UserError | None = None

    def acquire(self) -> RunLock:
        """Acquire the lock. UserError if another run has it, or for files of other programs."""
        directory = self._path.parent
        require_writable_run_directory(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._file = _open_locked(self._path)
        # Another run may have taken and left it since the check; this one waits for no answer.
        before = _holder(self._path)
        if before is not None and before.boot != self.holder.boot and before.is_alive(self._path):
            os.close(self._file)
            raise _in_use(directory, before)
        self._write(0)
        run_identity(directory)
        threading.Thread(target=self._renew, name="run-lock", daemon=True).start()
        return self

    def lost_error(self) -> UserError | None:
        """Why this run must not write any more; None as long as it owns the directory."""
        return self._lost

    def release(self) -> None:
        """Remove the lock, if this process still owns it."""
        self._ended.set()
        if _holder(self._path) == self.holder:
            self._path.unlink()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, beat: int) -> None:
        text = json.dumps({**asdict(self.holder), "beat": f"{beat:09}"}) + "\n"
        os.ftruncate(self._file, os.pwrite(self._file, text.encode(), 0))

    def _renew(self) -> None:
        beat = 0
        while not self._ended.wait(_BEAT_SECONDS):
            beat += 1
            # A fault of the file system is for those to report who need what they write.
            with suppress(OSError):
                if _holder(self._path) == self.holder:
                    self._write(beat)
                elif not self._ended.is_set():
                    self._lost = removed_directory_error(self._path.parent)


def run_identity(run_dir: Path) -> str:
    """The identity of the run in this directory, which its checkpoints name. It is made where there
    is none."""
    marker = run_dir / MARKER_FILE
    identity = marker.read_text().strip() if marker.is_file() else ""
    if not identity:
        identity = uuid.uuid4().hex[:16]
        write_text_atomically(marker, identity + "\n")
    return identity


def removed_directory_error(run_dir: Path) -> UserError:
    """The error of a run that does not own its directory any more."""
    return UserError(
        f"the directory {run_dir}, or {LOCK_FILE} in it, was removed or replaced while the run "
        "wrote to it",
        remedy="leave the directory of a run alone until the run ends",
    )


def require_shared_directory(
    directory: Path, holder: LockHolder, seconds: float = _SEEN_SECONDS
) -> None:
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


def require_writable_run_directory(directory: Path, key: str = "trainer.default_local_dir") -> None:
    """UserError if a run cannot write to ``directory``: another run does, it has files of other
    programs, or the system refuses. ``key`` names the directory in messages. Writes nothing.
    """
    with convert_input_errors(key):
        require_writable(directory)
    if not directory.is_dir():
        if directory.exists():
            raise UserError(f"{directory} is no directory", key=key)
        return
    holder = _holder(directory / LOCK_FILE)
    if holder is not None and holder.is_alive(directory / LOCK_FILE):
        raise _in_use(directory, holder)
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


def _in_use(directory: Path, holder: LockHolder | None) -> UserError:
    who = f"the run with pid {holder.pid} on {holder.host}" if holder else "a run that begins"
    return UserError(
        f"{directory} is in use by {who}",
        remedy="wait for it, or give this run another trainer.experiment_name",
    )


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _holder(lock: Path) -> LockHolder | None:
    """The owner in the lock file; None without a file, or if it is incomplete."""
    try:
        found = json.loads(lock.read_text())
        return LockHolder(**{field.name: found[field.name] for field in fields(LockHolder)})
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None


def _renewed(lock: Path) -> bool:
    """Whether the content of the file changes within 20 s; the hosts' clocks need not agree."""
    try:
        before, deadline = lock.read_bytes(), time.monotonic() + _SILENT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.5)
            if lock.read_bytes() != before:
                return True
    except FileNotFoundError:
        return False
    return False


def _open_locked(path: Path) -> int:
    """A descriptor of the file, which is created if need be, with the kernel's lock. UserError if
    another process has that lock.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _flock(descriptor, fcntl.LOCK_EX):
            os.close(descriptor)
            raise _in_use(path.parent, _holder(path))
        try:
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass  # released between the two lines above
        os.close(descriptor)


def _is_locked(path: Path) -> bool:
    """Whether a process has the kernel's lock of the file."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False  # released, or another user's: its process was looked for already
    try:
        return not _flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _flock(descriptor: int, kind: int) -> bool:
    """Whether the lock is acquired; True as well on a file system that has no such locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
