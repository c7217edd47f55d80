"""A job's private directory where no file system of its own bounds it: how much is in it, and its
removal whatever a program made of it.
"""

from __future__ import annotations

import os
import stat

MAX_ENTRIES = 4096
_BLOCK = 512


def exceeds(directory: str, limit_bytes: int) -> bool:
    """Whether ``directory`` holds more than ``limit_bytes`` or ``MAX_ENTRIES``, or cannot be
    searched to its end.
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
            continue  # removed while we looked
        except OSError:
            return True  # a path too long to follow
        if used > limit_bytes or entries > MAX_ENTRIES:
            return True
    return False


def remove_tree(directory: str) -> None:
    """Remove ``directory`` and all in it. Folders are moved up one by one, so that neither depth
    nor the length of a path matters.
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
                    number = _free_number(directory, number + 1)
                    os.rename(entry.path, _moved(directory, number))
                else:
                    os.unlink(entry.path)
            os.rmdir(folder)


def _searchable(folder: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except PermissionError:
        os.chmod(folder, stat.S_IRWXU)
        return list(os.scandir(folder))


def _moved(directory: str, number: int) -> str:
    return os.path.join(directory, f"moved-{number}")


def _free_number(directory: str, number: int) -> int:
    while os.path.lexists(_moved(directory, number)):
        number += 1
    return number
