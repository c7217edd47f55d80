"""The Python stacks of a rank, for whoever wants to know where it hangs."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_WAIT_SECONDS = 2.0


class StackFile:
    """``stacks/rank_N.txt`` in a run's directory: the stacks of all threads of this process.

    They are written by ``append_stacks``, when the process gets SIGUSR1, and when it crashes
    (SIGSEGV, SIGABRT and the like); the signals work also while a thread holds Python's interpreter
    lock. Later stacks follow earlier ones. One process has one such file (main thread only).
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.folder = run_dir / "stacks"
        self.folder.mkdir(exist_ok=True)
        self._file = _path(self.folder, rank).open("a")
        self._enabled_before = faulthandler.is_enabled()
        faulthandler.enable(self._file)
        faulthandler.register(signal.SIGUSR1, self._file)

    def append_stacks(self, why: str) -> None:
        """Append the stacks, below a line with the time and the reason."""
        with suppress(OSError):  # a full disk must not keep a failed run from ending
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {why}", file=self._file, flush=True)
            faulthandler.dump_traceback(self._file)

    def request_stacks_of(self, rank: int, pid: int) -> None:
        """Let another rank of this host append its stacks, and wait for them for two seconds; a
        process that is suspended writes none.
        """
        file = _path(self.folder, rank)
        before, deadline = _size(file), time.monotonic() + _WAIT_SECONDS
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            return
        while _size(file) == before and time.monotonic() < deadline:
            time.sleep(0.05)

    def close(self) -> None:
        """Write no more. Files without stacks are removed."""
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
        if self._enabled_before:
            faulthandler.enable()
        self._file.close()
        # The run's directory may have been removed, and other ranks may have stacks.
        with suppress(OSError):
            if not _size(Path(self._file.name)):
                os.unlink(self._file.name)
            self.folder.rmdir()


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.txt"


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0
