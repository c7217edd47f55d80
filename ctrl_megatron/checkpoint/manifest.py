"""The manifest of a directory: who wrote it, and size and hash of every file, to notice damage.

A checkpoint's manifest and the files of its tensors also name the run and the step, so that a file
of another run or step is recognised as such.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from blake3 import blake3

from ctrl_megatron.checkpoint.hashes import hash_files, num_hashing_threads
from ctrl_megatron.errors import UserError

MARKER = ".ctrl_megatron.json"
"""The manifest, a file in a directory that a tool wrote."""
TRAINER = "train"
"""The tool that writes checkpoints and exports."""
ANOTHER = "copy it anew, or name another with trainer.resume_mode"
"""The remedy for a damaged checkpoint."""
_HASHES, _SEAL = "blake3", "seal"
_HEADER_BYTES = 4096
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""Error numbers for a name that no ordinary file has. Other errors (permission, a fault of the
disk or the network) say nothing about the file."""


class DamagedFiles(UserError):
    """Files are not as they were written."""


@dataclass(frozen=True, slots=True)
class CheckpointOrigin:
    """The run that wrote a checkpoint, by its identity (``run_identity``), and the step."""

    run: str
    step: int

    def header_line(self) -> bytes:
        """The first line of a file of tensors."""
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a manifest."""

    tool: str
    sizes: Mapping[str, int]
    """Bytes of every file, by relative path; an empty directory ends with a slash."""
    hashes: Mapping[str, str] = field(default_factory=dict)
    """BLAKE3 of every file; empty if an older version wrote the manifest."""
    origin: CheckpointOrigin | None = None


def write_manifest(
    directory: Path,
    tool: str,
    *,
    known: Mapping[str, str] | None = None,
    origin: CheckpointOrigin | None = None,
) -> None:
    """Write the manifest of all files in ``directory``; ``known`` are hashes by relative path, the
    other files are read.
    """
    sizes, known = file_sizes(directory), known or {}
    names = [name for name in sizes if name not in known and not name.endswith("/")]
    hashes = dict(known)
    found = hash_files([directory / name for name in names], num_hashing_threads())
    for name, one in zip(names, found, strict=True):
        if isinstance(one, OSError):
            raise one
        hashes[name] = one
    text: dict[str, Any] = {"tool": tool, **(asdict(origin) if origin else {})}
    text |= {"files": sizes, _HASHES: {name: hashes[name] for name in sorted(hashes)}}
    text[_SEAL] = _seal(text)
    (directory / MARKER).write_text(json.dumps(text, indent=1) + "\n")


def unreadable_error(file: Path, error: OSError) -> UserError:
    """The error of a file that the system does not read: DamagedFiles where there is none, else one
    that says nothing about the file.
    """
    if error.errno in _ABSENT:
        return DamagedFiles("is missing", file=file, remedy=ANOTHER)
    return UserError(
        f"cannot be read now ({error.strerror}), so it is not known whether the files are whole",
        file=file,
        remedy="make it readable and start again; to do without the checkpoint, move it away",
    )


def ordinary_file_size(file: Path) -> int | None:
    """Bytes of an ordinary file; None if there is none. UserError if that cannot be seen now."""
    try:
        found = file.stat()
    except OSError as error:
        fault = unreadable_error(file, error)
        if isinstance(fault, DamagedFiles):
            return None
        raise fault from error
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def read_ordinary_file(file: Path) -> bytes:
    """The content of a file of a checkpoint. DamagedFiles if it is missing or no ordinary file,
    UserError if it cannot be read now.
    """
    try:
        # Without O_NONBLOCK, a named pipe would wait for somebody who writes to it.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise DamagedFiles("is no ordinary file", file=file, remedy=ANOTHER)
            return opened.read()
    except OSError as error:
        raise unreadable_error(file, error) from error


def read_checkpoint_json(file: Path) -> Any:
    """The value in a JSON file of a checkpoint. Raises as ``read_ordinary_file``."""
    data = read_ordinary_file(file)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedFiles(f"cannot be read: {error}", file=file, remedy=ANOTHER) from error


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of ``directory``; None without one. DamagedFiles if it is no manifest, or was
    changed; UserError if it cannot be read now.
    """
    file = directory / MARKER
    if not os.path.lexists(file) and ordinary_file_size(file) is None:
        return None
    try:
        record = read_checkpoint_json(file)
        hashed = _SEAL in record or _HASHES in record
        if hashed and record.pop(_SEAL, None) != _seal(record):
            raise ValueError("its content is not that which was written")
        sizes, hashes = record["files"], record.get(_HASHES, {})
        if not isinstance(sizes, dict) or not isinstance(hashes, dict):
            raise TypeError("it has no list of files")
        for name in (*sizes, *hashes):
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"it lists {name!r}, which is not below its directory")
        origin = CheckpointOrigin(record["run"], record["step"]) if "run" in record else None
        return Manifest(tool=record["tool"], sizes=sizes, hashes=hashes, origin=origin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise DamagedFiles(f"is damaged: {error}", file=file) from error


def _seal(text: Mapping[str, Any]) -> str:
    return blake3(json.dumps(text, sort_keys=True).encode()).hexdigest()


def file_sizes(directory: Path) -> dict[str, int]:
    """Size of every file below but the manifest, by relative path; an empty directory counts as a
    file.
    """
    sizes = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink() or not path.is_dir():
            sizes[name] = path.lstat().st_size
        elif not any(path.iterdir()):
            sizes[name + "/"] = 0
    sizes.pop(MARKER, None)
    return sizes


def find_missing_or_resized_files(directory: Path, manifest: Manifest) -> dict[str, str]:
    """Name -> reason of every file of the manifest that is missing or has another size. UserError
    if that cannot be seen now.
    """
    found = {}
    for name, size in manifest.sizes.items():
        path = directory / name
        if name.endswith("/"):
            continue
        if (there := ordinary_file_size(path)) is None:
            found[name] = "is missing"
        elif there != size:
            origin = _other_origin(path, manifest)
            found[name] = origin or f"has {there} of {size} bytes"
    return found


def find_changed_files(
    directory: Path, manifest: Manifest, names: Collection[str]
) -> dict[str, str]:
    """Name -> reason of those of ``names`` whose content is not what was written. Reads them;
    UserError for one that cannot be read now.
    """
    hashes = hash_files([directory / name for name in names], num_hashing_threads())
    found = {}
    for name, one in zip(names, hashes, strict=True):
        if isinstance(one, OSError):
            fault = unreadable_error(directory / name, one)
            if not isinstance(fault, DamagedFiles):
                raise fault from one
            found[name] = "is missing"
        elif one != manifest.hashes[name]:
            origin = _other_origin(directory / name, manifest)
            found[name] = origin or "is not what was saved: its BLAKE3 hash differs"
    return found


def find_added_files(directory: Path, manifest: Manifest) -> list[str]:
    return [name for name in file_sizes(directory) if name not in manifest.sizes]


def require_undamaged(directory: Path, reasons: Mapping[str, str], remedy: str) -> None:
    """DamagedFiles, in one line, if there is any (name -> reason)."""
    if reasons:
        name, reason = min(reasons.items())
        more = f" ({len(reasons) - 1} further files are damaged)" if len(reasons) > 1 else ""
        raise DamagedFiles(reason + more, file=directory / name, remedy=remedy)


def verify_manifest(directory: Path, *, remedy: str) -> Manifest | None:
    """Compare every file with the manifest, which is returned; None without hashes. DamagedFiles
    for the first one that differs, UserError if one cannot be read now.
    """
    manifest = read_manifest(directory)
    if manifest is None or not manifest.hashes:
        return None
    wrong = find_missing_or_resized_files(directory, manifest)
    wrong |= find_changed_files(directory, manifest, [n for n in manifest.hashes if n not in wrong])
    require_undamaged(directory, wrong, remedy)
    return manifest


def split_by_bytes(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """The names in ``count`` shares of about the same number of bytes."""
    shares: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        shares[least].append(name)
        loads[least] += sizes[name]
    return shares


def _other_origin(path: Path, manifest: Manifest) -> str:
    """How the run or the step that ``path`` names differs from the manifest's; empty if not."""
    expected, theirs = manifest.origin, _origin_in(path)
    if expected is None or theirs is None or expected == theirs:
        return ""
    if expected.run != theirs.run:
        return f"is of another run ({theirs.run}, step {theirs.step})"
    return f"is of step {theirs.step}, not of step {expected.step}"


def _origin_in(path: Path) -> CheckpointOrigin | None:
    """The origin in a JSON file, or in the first line of another one."""
    try:
        if path.suffix == ".json":
            facts = json.loads(path.read_text())
        else:
            with open(path, "rb") as file:
                facts = json.loads(file.readline(_HEADER_BYTES))
        return CheckpointOrigin(str(facts["run"]), int(facts["step"]))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
