"""Types of the flags of commands: numbers with bounds, and paths to read or to write.

A parser refuses nan, infinities and integers of more than 64 bits for every flag.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ctrl_megatron import __version__
from ctrl_megatron.errors import UserError

VERSION = f"ctrl_megatron {__version__}"
_LARGEST, _MANY = 2**63 - 1, 2**31 - 1
_LONGEST_NAME = 240
"""Longest file name, in bytes: of the 255 that are possible, a draft of the file adds some."""
_VALUE, _SAID = "=", ": "
"""Beginnings of a message that continues the flag's name."""


class CommandParser(argparse.ArgumentParser):
    """A parser that raises UserError for wrong arguments."""

    def __init__(self, description: str | None) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=formatter)
        self.add_argument("--version", action="version", version=VERSION)
        self.register("type", int, integer_flag())
        self.register("type", float, float_flag())

    def error(self, message: str) -> NoReturn:
        about_value = re.match(rf"argument (?:\S+/)?(\S+): (?={_VALUE}|{_SAID})", message)
        if about_value is not None:
            raise UserError(about_value[1] + message[about_value.end() :])
        raise UserError(message, remedy="--help shows what there is")


class ToolParser(CommandParser):
    """The parser of a tool: wrong arguments end it with one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        try:
            super().error(message)
        except UserError as error:
            self.exit(2, f"{self.prog}: {error}\n")


def integer_flag(least: int = -_LARGEST, most: int = _LARGEST) -> Callable[[str], int]:
    """The type of a flag that is a whole number."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise _refused(text, "is no whole number") from None
        _require(value >= least, text, f"at least {least}")
        _require(value <= most, text, f"at most {most}")
        return value

    return read


def count_flag(least: int = 1) -> Callable[[str], int]:
    """The type of a flag that counts something."""
    return integer_flag(least, _MANY)


def float_flag(
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: float = -math.inf,
    below: float = math.inf,
) -> Callable[[str], float]:
    """The type of a flag that is a finite number; ``above`` and ``below`` are not in its range."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise _refused(text, "is no number") from None
        if not math.isfinite(value):
            raise _refused(value, "must be a finite number")
        _require(value >= least, value, f"at least {least:g}")
        _require(value <= most, value, f"at most {most:g}")
        _require(value > above, value, f"greater than {above:g}")
        _require(value < below, value, f"below {below:g}")
        return value

    return read


share = float_flag(0, below=1)
"""The type of a flag that is a share, from 0 to below 1."""
temperature = float_flag(0, 100)
port = integer_flag(0, 65535)


def existing_path(text: str) -> Path:
    """The type of a flag that names a file or directory to read."""
    path = Path(text)
    # Unlike Path's, they answer for names that no file can have.
    if not (os.path.isfile(path) or os.path.isdir(path)):
        there = "is neither a file nor a directory" if os.path.lexists(path) else "does not exist"
        raise _refused(path, there)
    if not os.access(path, os.R_OK):
        raise _refused(path, f"may not be read by the user with uid {os.geteuid()}")
    return path


def existing_file(text: str) -> Path:
    """The type of a flag that names a file to read."""
    path = existing_path(text)
    if path.is_dir():
        raise _refused(path, "is a directory; name a file")
    return path


def output_path(text: str) -> Path:
    """The type of a flag that names a file or directory to write."""
    path = Path(text)
    try:
        require_writable(path)
    except UserError as error:
        raise argparse.ArgumentTypeError(f"{_SAID}{error}") from None
    return path


def require_writable(path: Path) -> None:
    """UserError if nothing can be written at ``path``: it is a device or a pipe, or no file can be
    created in its directory, or in the nearest existing one above. Creates nothing.
    """
    is_file = os.path.isfile(path)
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise UserError(f"{path}: {os.strerror(errno.ENAMETOOLONG)}")
    if os.path.lexists(path) and not (is_file or os.path.isdir(path)):
        raise UserError(f"{path} is no file or directory that can be replaced")
    above = path.absolute().parents
    places = above if is_file else (path, *above)
    there = next(place for place in places if os.path.lexists(place))
    if not there.is_dir():
        raise UserError(f"{there} is no directory")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        who = f"the user with uid {os.geteuid()}"
        raise UserError(
            f"{there} cannot be written by {who}: {error.strerror}", remedy="name another path"
        ) from error


def _require(holds: bool, given: object, what: str) -> None:
    if not holds:
        raise _refused(given, f"must be {what}")


def _refused(given: object, problem: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{_VALUE}{given} {problem}")
