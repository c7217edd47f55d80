"""Files of one JSON object per line that survive a killed writer."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctrl_megatron.errors import UserError, name_file_in_errors, read_text


class JsonlWriter:
    """Appends whole lines with one write each, so that a reader never sees a part of one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        # A writer that was killed in the middle of a line must not spoil the next one.
        os.ftruncate(self._file, path.read_bytes().rfind(b"\n") + 1)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write ``record`` as one line. Non-finite numbers become "nan", "inf" or "-inf".

        OSError, which names the file, if the line cannot be written; then none of it is.
        """
        line = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n"
        data = line.encode("utf-8", errors="backslashreplace")
        size = os.fstat(self._file).st_size
        with name_file_in_errors(self._path):
            if os.write(self._file, data) != len(data):
                os.ftruncate(self._file, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of the file; a last line without its newline is still being written.

    Raises ValueError naming file and line for text that is not a JSON object.
    """
    records: list[dict[str, Any]] = []
    *lines, _partial = read_text(path).split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise UserError(f"{path} line {number} must be an object, not {line[:40]!r}")
        records.append(record)
    return records


def incomplete_last_line(path: Path) -> int | None:
    """The number of an incomplete last line, which ``read_json_lines`` skips; None if every line is
    complete.
    """
    *lines, partial = read_text(path).split("\n")
    return len(lines) + 1 if partial else None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
