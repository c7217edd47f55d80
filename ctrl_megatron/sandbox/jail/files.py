"""Files that go into and come out of a job's private directory."""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterable, Mapping

_FETCH_BYTES = 16 << 20


def inside(path: str) -> str:
    """``path`` relative to the private directory; absolute paths may name ``/tmp/...``.

    Raises ``ValueError`` for a path that leaves the directory.
    """
    relative = os.path.normpath(path.removeprefix("/tmp/") if path.startswith("/tmp/") else path)
    if os.path.isabs(relative) or relative.split(os.sep)[0] in ("..", ".") or "\0" in relative:
        raise ValueError(f"file {path!r} is outside the program's directory")
    return relative


def write(directory: str, contents: Mapping[str, str]) -> None:
    """Write base64 ``contents`` (relative path -> text) below ``directory``, before any program
    runs.
    """
    for relative, text in contents.items():
        target = os.path.join(directory, relative)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as stream:
            stream.write(base64.b64decode(text))


def fetch(directory: str, wanted: Iterable[str]) -> dict[str, str]:
    """Base64 content of those of ``wanted`` (relative paths) that are regular files; runs after the
    program.

    No link is followed: it could lead out of the directory.
    """
    found = {}
    for relative in wanted:
        content = _read_regular(directory, relative.split(os.sep))
        if content is not None:
            found[relative] = base64.b64encode(content).decode()
    return found


def _read_regular(directory: str, parts: list[str]) -> bytes | None:
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = inner
        file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
    except OSError:
        return None  # absent, a link, or unreadable: nothing to fetch
    finally:
        os.close(fd)
    with os.fdopen(file, "rb") as stream:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        return stream.read(_FETCH_BYTES)
