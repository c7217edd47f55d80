"""The fixture ``caplog`` of the stand-in for pytest, apart because it imports logging."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any


class CaptureLog(logging.Handler):
    """The fixture ``caplog``."""

    def __init__(self) -> None:
        super().__init__(0)
        self.records: list[logging.LogRecord] = []
        self._levels: list[tuple[logging.Logger, int]] = []
        logging.root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        """The texts that were logged."""
        return [record.getMessage() for record in self.records]

    @property
    def text(self) -> str:
        """All that was logged, line by line."""
        return "".join(f"{r.levelname} {r.name}: {r.getMessage()}\n" for r in self.records)

    @property
    def record_tuples(self) -> list[tuple[str, int, str]]:
        """Name, level and text of each record."""
        return [(r.name, r.levelno, r.getMessage()) for r in self.records]

    def clear(self) -> None:
        """Forget what was logged."""
        self.records.clear()

    def set_level(self, level: Any, logger: str | None = None) -> None:
        """Log from a level on until the test ends."""
        found = logging.getLogger(logger)
        self._levels.append((found, found.level))
        found.setLevel(level)

    @contextlib.contextmanager
    def at_level(self, level: Any, logger: str | None = None) -> Iterator[None]:
        """Log from a level on in a ``with`` block."""
        found = logging.getLogger(logger)
        before = found.level
        found.setLevel(level)
        try:
            yield
        finally:
            found.setLevel(before)

    def close(self) -> None:
        """End capturing."""
        logging.root.removeHandler(self)
        for logger, level in reversed(self._levels):
            logger.setLevel(level)
        super().close()
