"""Lets a decoding thread run step by step, and stops it between two steps."""

from __future__ import annotations

import threading


class Ticket:
    """What a call passes the gate with; worthless once its work was aborted."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch


class Gate:
    """Opened and closed by the event loop, passed by the decoding thread before each step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = True
        self._inside = False
        # Counts aborts; work begun in an earlier epoch must end.
        self._epoch = 0

    def ticket(self) -> Ticket:
        """For work that begins now."""
        with self._changed:
            return Ticket(self._epoch)

    def revoke(self, ticket: Ticket) -> None:
        """End the work of one ticket."""
        with self._changed:
            ticket.epoch = -1
            self._changed.notify_all()

    def enter(self, ticket: Ticket) -> bool:
        """Wait until open. False if the ticket's work must end, else ``leave`` must follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_open or ticket.epoch < self._epoch)
            if ticket.epoch < self._epoch:
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
            self._epoch += abort
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
