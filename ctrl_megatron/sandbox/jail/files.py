"""A job's private directory: files that are written and fetched; and, where no file system of its
own limits it, its size and its removal in any state.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterable, Mapping

from ctrl_megatron.sandbox.limits import FETCHED_BYTES, INPUT_FILES, NAME_BYTES, PATH_BYTES

MAX_ENTRIES = 4096
_BLOCK = 512


def relative_private_path(path: str) -> str:
    """``path`` relative to the private directory; absolute paths may begin with ``/tmp/``."""
    relative = os.path.normpath(path.removeprefix("/tmp/") if path.startswith("/tmp/") else path)
    if os.path.isabs(relative) or relative.split(os.sep)[0] in ("..", ".") or "\0" in relative:
        raise ValueError(f"file {path!r} is outside the program's directory")
    return relative


def write_files(directory: str, contents: Mapping[str, str]) -> None:
    """Write ``contents`` (base64 by relative path) below ``directory``, before a program runs."""
    for relative, text in contents.items():
        target = os.path.join(directory, relative)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as stream:
            stream.write(base64.b64decode(text))


def relative_paths(paths: Iterable[str]) -> list[str]:
    """The relative form of ``paths``. Raises ``ValueError`` if the files cannot all
    exist together.
    """
    relative: list[str] = []
    for path in paths:
        inner = relative_private_path(path)
        if len(os.fsencode(inner)) > PATH_BYTES or any(
            len(os.fsencode(part)) > NAME_BYTES for part in inner.split(os.sep)
        ):
            raise ValueError(
                f"file {path[:50]!r}... has a name that is too long: at most {NAME_BYTES} bytes "
                f"between slashes, {PATH_BYTES} in all"
            )
        relative.append(inner)
    if len(relative) > INPUT_FILES:
        raise ValueError(f"{len(relative)} files; a request may name {INPUT_FILES}")
    names: set[str] = set()
    for path in relative:
        if path in names:
            raise ValueError(f"file {path!r} is named twice")
        names.add(path)
    for path in relative:
        parts = path.split(os.sep)
        for depth in range(1, len(parts)):
            if (folder := os.sep.join(parts[:depth])) in names:
                raise ValueError(f"file {folder!r} is the folder of file {path!r} as well")
    return relative


def read_files_as_base64(directory: str, wanted: Iterable[str]) -> dict[str, str] | None:
    """Content in base64 of those of ``wanted`` (relative paths) that are regular files, after the
    program has run. None if they are larger than ``FETCHED_BYTES`` together.

    Links are not followed, because they may lead out of the directory.
    """
    contents, left = {}, FETCHED_BYTES
    for relative in wanted:
        content = _read_regular(directory, relative.split(os.sep), left + 1)
        if content is not None:
            contents[relative] = base64.b64encode(content).decode()
            left -= len(content)
            if left < 0:
                return None
    return contents


def _read_regular(directory: str, parts: list[str], most: int) -> bytes | None:
    """The first ``most`` bytes of a regular file, None if there is no such file."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = inner
        file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
    except OSError:
        return None  # absent, a link, or unreadable
    finally:
        os.close(fd)
    with os.fdopen(file, "rb") as stream:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        return stream.read(most)


def directory_exceeds(directory: str, limit_bytes: int) -> bool:
    """Whether the directory contains too many bytes or entries, or cannot be searched
    completely.
    """
    used, entries, folders = 0, 0, [directory]
    while folders:
        try:
            for entry in _searchable(folders.pop()):
                entries += 1
                used += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError:
            return True  # a path too long to follow
        if used > limit_bytes or entries > MAX_ENTRIES:
            return True
    return False


def remove_tree(directory: str) -> None:
    """Remove ``directory`` and its contents. Folders are moved up one by one, so that neither depth
    nor path length matters.
    """
    number = 0
    os.chmod(directory, stat.S_IRWXU)
    while True:
        folders = []
        for entry in os.scandir(directory):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                os.unlink(entry.path)
        if not folders:
            os.rmdir(directory)
            return
        for folder in folders:
            for entry in _searchable(folder):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, stat.S_IRWXU)
                    number += 1
                    while os.path.lexists(moved := os.path.join(directory, f"moved-{number}")):
                        number += 1
                    os.rename(entry.path, moved)
                else:
                    os.unlink(entry.path)
            os.rmdir(folder)


def _searchable(folder: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except PermissionError:
        os.chmod(folder, stat.S_IRWXU)
        return list(os.scandir(folder))
