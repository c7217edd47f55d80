"""Lets a decoding thread run step by step, and stops it between two steps."""

from __future__ import annotations

import threading


class Gate:
    """Opened and closed by the event loop, passed by the decoding thread before each step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = True
        self._inside = False
        self.epoch = 0
        """Counts aborts; work begun in an earlier epoch must end."""

    def enter(self, epoch: int) -> bool:
        """Wait until open. False if work of this epoch was aborted, else ``leave`` must follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_open or epoch < self.epoch)
            if epoch < self.epoch:
                return False
            self._inside = True
            return True

    def leave(self) -> None:
        """The step is over."""
        with self._changed:
            self._inside = False
            self._changed.notify_all()

    def close(self, *, abort: bool) -> None:
        """Return once no step runs and none can begin; with ``abort`` end all work begun so far."""
        with self._changed:
            self._is_open = False
            self.epoch += abort
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._inside)

    def open(self) -> None:
        """Let steps begin."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    @property
    def is_open(self) -> bool:
        """Whether steps may begin."""
        with self._changed:
            return self._is_open
