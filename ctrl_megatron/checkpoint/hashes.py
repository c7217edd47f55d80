"""BLAKE3 hashes of files, of existing ones and of those that are being written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO, RawIOBase
from pathlib import Path
from typing import Any

from blake3 import blake3

_CHUNK = 1 << 20
"""Bytes that are read and hashed at a time; they stay in the cache of a core."""
_ASIDE = 1 << 18
"""Bytes from which a second thread is worth its start."""


def hash_file(path: Path) -> str:
    """BLAKE3 of a file's content, 64 hexadecimal digits. Raises OSError."""
    checksum, buffer = blake3(), memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while read := file.readinto(buffer):
            checksum.update(buffer[:read])
    return checksum.hexdigest()


def hash_files(paths: Iterable[Path], threads: int) -> list[str | OSError]:
    """``hash_file`` of each path, in order, on ``threads`` threads; the error where one failed."""

    def hashed(path: Path) -> str | OSError:
        try:
            return hash_file(path)
        except OSError as error:
            return error

    with ThreadPoolExecutor(max(1, threads)) as pool:
        return list(pool.map(hashed, paths))


class HashingFile(RawIOBase):
    """A new file whose content ``aside``, a pool of threads, hashes while it is written."""

    def __init__(self, path: Path, aside: ThreadPoolExecutor) -> None:
        self._file, self._aside, self._checksum = FileIO(path, "w"), aside, blake3()
        self._fault: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write all of ``data``, which may change afterwards. Raises OSError."""
        view = memoryview(data).cast("B")
        if len(view) < _ASIDE:
            self._checksum.update(view)
            self._write(view)
        else:
            hashing = self._aside.submit(self._checksum.update, view)
            try:
                self._write(view)
            finally:
                hashing.result()
        return len(view)

    def _write(self, view: memoryview) -> None:
        try:
            while len(view):
                view = view[self._file.write(view) :]
        except OSError as error:
            self._fault = error
            raise

    @contextmanager
    def reraise_write_errors(self) -> Iterator[None]:
        """Let the OSError of a failed ``write`` leave the block, whatever a library that called it
        raises in its place."""
        try:
            yield
        except Exception as error:
            if self._fault is not None:
                raise self._fault from error
            raise

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Close the file; ``hexdigest`` stays."""
        self._file.close()
        super().close()

    def hexdigest(self) -> str:
        """``hash_file`` of what is written so far."""
        return self._checksum.hexdigest()


def num_hashing_threads() -> int:
    """Threads of this process for hashing: the cores that it may use, at most four."""
    return min(4, len(os.sched_getaffinity(0)))
