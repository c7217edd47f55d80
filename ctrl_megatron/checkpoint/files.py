"""Files and directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_directory(target: str | Path, *, active: bool = True) -> Iterator[Path]:
    """A new directory beside ``target`` that takes its name when the block succeeds.

    An existing ``target`` is replaced. ``active=False`` (ranks that do not write) yields the
    target's path and does nothing.
    """
    target = Path(target)
    if not active:
        yield target
        return
    work = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    work.mkdir(parents=True)
    try:
        yield work
        replaced = target.with_name(work.name + ".old")
        if target.exists():
            target.rename(replaced)
        work.rename(target)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def write_whole(path: str | Path, text: str) -> None:
    """Replace the file's content in one step."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    work.write_text(text)
    os.replace(work, path)
