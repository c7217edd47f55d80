"""Files and directories that appear completely or not at all, and never replace those of others."""

from __future__ import annotations

import glob
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ctrl_megatron.checkpoint.manifest import (
    MARKER,
    DamagedFiles,
    file_sizes,
    read_manifest,
    write_manifest,
)
from ctrl_megatron.errors import UserError, name_file_in_errors


@contextmanager
def atomic_directory(target: str | Path, *, active: bool = True) -> Iterator[Path]:
    """A new directory beside ``target`` that takes its name when the block succeeds.

    An existing ``target`` is replaced, and incomplete copies of a killed process are removed.
    ``active=False`` (ranks that do not write) yields the target's path and does nothing.
    """
    target = Path(target)
    if not active:
        yield target
        return
    for draft in _left_behind(target, ""):
        shutil.rmtree(draft)
    work = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    work.mkdir(parents=True)
    replaced = target.with_name(work.name + ".old")
    try:
        yield work
        if target.exists():
            target.rename(replaced)
        work.rename(target)
    except BaseException:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        shutil.rmtree(work, ignore_errors=True)
        raise
    for old in _left_behind(target, ".old"):
        shutil.rmtree(old, ignore_errors=True)


def _left_behind(target: Path, ending: str) -> list[Path]:
    """Directories beside ``target`` with the names that ``atomic_directory`` gives."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}{re.escape(ending)}")
    beside = target.parent.glob(f".{glob.escape(target.name)}.*")
    return [path for path in beside if name.fullmatch(path.name) and path.is_dir()]


@contextmanager
def tool_output_directory(target: Path, tool: str, *, overwrite: bool) -> Iterator[Path]:
    """``atomic_directory`` for the output of ``tool``, with a manifest.

    Raises the UserErrors of ``require_replaceable_directory``.
    """
    require_replaceable_directory(target, tool, overwrite=overwrite)
    with atomic_directory(target) as work:
        yield work
        write_manifest(work, tool)


@contextmanager
def tool_output_files(
    folder: Path, names: Collection[str], tool: str, *, overwrite: bool
) -> Iterator[Path]:
    """A new directory whose files, some of ``names``, move to ``folder`` when the block succeeds.

    Raises the UserErrors of ``require_replaceable_files``; other files of ``folder`` stay.
    """
    require_replaceable_files(folder, names, tool, overwrite=overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / f".{tool}.{uuid.uuid4().hex[:8]}"
    work.mkdir()
    try:
        yield work
        write_manifest(work, tool)
        # The mark is written first, so that after a kill the tool recognises its files.
        for path in sorted(work.iterdir(), key=lambda path: (path.name != MARKER, path.name)):
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def tool_files_unchanged(folder: Path, tool: str) -> bool:
    """Whether ``tool`` wrote files into ``folder`` and all of them have the size that they had
    then."""
    wrote = _written_by(tool, folder)
    there = {name: folder / name for name in wrote}
    return bool(wrote) and all(
        path.is_file() and path.stat().st_size == wrote[name] for name, path in there.items()
    )


def remove_tool_files(folder: Path, tool: str) -> None:
    """Remove the files that ``tool`` wrote into ``folder`` and that are unchanged."""
    for name, size in _written_by(tool, folder).items():
        path = folder / name
        if path.is_file() and path.stat().st_size == size:
            path.unlink()
    if _written_by(tool, folder):
        (folder / MARKER).unlink()


def require_replaceable_files(
    folder: Path, names: Collection[str], tool: str, *, overwrite: bool
) -> None:
    """UserError if ``folder`` is no directory, or has one of ``names``; with ``overwrite``, only if
    ``tool`` did not write that file as it is.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"--out: {folder} is there and is no directory")
    wrote = _written_by(tool, folder)
    for name in names:
        there = folder / name
        if not os.path.lexists(there):
            continue
        if there.is_dir() or wrote.get(name) != there.lstat().st_size:
            raise UserError(f"--out: {there} was not written so by {tool}", remedy="name another")
        if not overwrite:
            raise UserError(f"--out: {there} is there; --overwrite replaces it")


def require_replaceable_file(
    out: Path, text: str, is_own: Callable[[Path], bool], *, overwrite: bool
) -> None:
    """UserError unless ``out`` is new, has the content ``text`` or, with ``overwrite``, is a file
    for which ``is_own`` is true.
    """
    if not os.path.lexists(out):
        return
    if out.is_dir() or not is_own(out):
        raise UserError(f"--out: {out} was not written by this tool", remedy="name another file")
    if not overwrite and out.read_text(encoding="utf-8") != text:
        raise UserError(f"--out: {out} is there and differs; --overwrite replaces it")


def require_replaceable_directory(target: Path, tool: str, *, overwrite: bool) -> None:
    """UserError unless ``target`` is new or an empty directory or, with ``overwrite``, has exactly
    the files that ``tool`` wrote, unchanged.
    """
    elsewhere = "name a new or empty directory"
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise UserError(f"--out: {target} is there and is no directory", remedy=elsewhere)
    if not any(target.iterdir()):
        return
    if overwrite:
        foreign = _foreign(target, tool)
        if foreign is None:
            return
        raise UserError(
            f"--out: {target} holds {foreign}, which {tool} did not write; --overwrite replaces "
            "only its own unchanged files",
            remedy=elsewhere,
        )
    own = "; --overwrite replaces it" if _foreign(target, tool) is None else ""
    raise UserError(f"--out: {target} is not empty{own}", remedy=elsewhere)


def _foreign(target: Path, tool: str) -> str | None:
    """A file in ``target`` that ``tool`` did not write, or not like this; None if there is none."""
    wrote, sizes = _written_by(tool, target), file_sizes(target)
    changed = (name for name, size in sizes.items() if wrote.get(name) != size)
    return next(changed, None) or (None if wrote else "directories")


def _written_by(tool: str, directory: Path) -> Mapping[str, int]:
    """Sizes, in bytes, of the files that ``tool`` recorded."""
    try:
        manifest = read_manifest(directory)
    except DamagedFiles:
        return {}
    return manifest.sizes if manifest is not None and manifest.tool == tool else {}


def free_disk_bytes(directory: Path) -> int:
    """Free bytes on the disk of ``directory``, which need not exist."""
    for place in (directory, *directory.absolute().parents):
        with suppress(FileNotFoundError):
            return shutil.disk_usage(place).free
    raise FileNotFoundError(directory)


def require_free_disk_bytes(directory: Path, num_bytes: int, what: str) -> None:
    """UserError if ``num_bytes`` do not fit on the disk of ``directory``, which may not exist."""
    free = free_disk_bytes(directory)
    if num_bytes > free:
        raise UserError(
            f"{what} needs {num_bytes / 2**20:.1f} MiB ({num_bytes} bytes), the disk of "
            f"{directory} has {free / 2**20:.1f} MiB free; nothing was begun",
            remedy="free space on it, or write to another one",
        )


def write_text_atomically(path: str | Path, text: str) -> None:
    """Replace the content of a file atomically."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with name_file_in_errors(path):
            work.write_text(text, encoding="utf-8")
            os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)
