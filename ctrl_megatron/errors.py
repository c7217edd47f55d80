"""Errors of the user's input, and which exceptions count as such.

A command prints a ``UserError`` once, without a traceback, and ends with exit code 2. Every other
exception is a fault of this package and keeps its traceback.
"""

from __future__ import annotations

import codecs
import errno
import inspect
import json
import os
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

WRONG_INPUT, FAILED, SERVICE, STOPPED = 2, 13, 14, 130
"""Exit codes: an error of the user (a full disk too); a bug or a dead process; a service that
judges failed too often; stopped by a signal."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_PATH = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
_TORCHS_GROUPS = "/torch/distributed/"
_SAID_FULL = "No space left on device"
"""The message of libraries that do not raise an OSError (safetensors, torch)."""

_NOTES, _NOTE, _NOTE_BYTES = "/dev/shm", "ctrl_running_", 300
_running: list[str] = []
"""Descriptions of the open ``convert_user_code_errors`` blocks of this process, in the order of
their starts.
"""
_note: list[int] = []
"""The descriptor of this process's note of it, if it keeps one."""


_secrets: list[str] = []
"""Texts that no message contains, longest first."""
_SHORTEST_SECRET = 4
"""Shorter ones would also be found within other words."""


class UserError(ValueError):
    """An input of the user that cannot be used. Only its message is kept: one line per problem."""

    def __init__(
        self,
        problem: str,
        *,
        key: str = "",
        file: str | os.PathLike[str] = "",
        row: int | None = None,
        remedy: str = "",
    ) -> None:
        """The message is built from these. ``key``: configuration key or argument of the input;
        ``row``: from 1, in ``file``; ``remedy``: what to do. ``problem`` may also be a whole
        sentence with all of it."""
        place = f"{os.fspath(file)}: row {row}" if row is not None else os.fspath(file)
        text = ": ".join(part for part in (key, place, problem) if part)
        super().__init__(without_concealed(f"{text}; {remedy}" if remedy else text))


def conceal_in_user_errors(secrets: Iterable[str]) -> None:
    """Let no message of a UserError contain these texts from now on, in this process."""
    known = {text for text in (*_secrets, *secrets) if len(text) >= _SHORTEST_SECRET}
    _secrets[:] = sorted(known, key=len, reverse=True)


def without_concealed(text: str) -> str:
    """``text`` without the texts that ``conceal_in_user_errors`` was given."""
    for secret in _secrets:
        text = text.replace(secret, "***")
    return text


class ServiceFault(RuntimeError):
    """A service that judges programs failed for too large a share of a step, also after retries.

    The step has changed nothing. The message is one line; a run ends with exit code 14.
    """


class ServiceLost(RuntimeError):
    """A service of the run can no longer answer what it was asked, and may be started again.

    The work has no result. It can be asked again once the service is restored.
    """


def find_user_error(error: BaseException | None) -> UserError | None:
    """The user's error behind ``error``: itself or its cause; None for a fault of the package.

    A full disk and a path without permission count as the user's.
    """
    while error is not None:
        if isinstance(error, UserError):
            return error
        found = _of_system(error)
        if found is not None:
            return found
        error = error.__cause__
    return None


def _of_system(error: BaseException) -> UserError | None:
    number = error.errno if isinstance(error, OSError) else None
    path = str(error.filename) if isinstance(error, OSError) and error.filename else ""
    if number in _FULL or _SAID_FULL in str(error):
        where = f"the disk of {path}" if path else "a disk"
        return UserError(f"{where} is full", remedy="free space on it, or write to another one")
    if number in _CLOSED and path:
        who = f"the user with uid {os.geteuid()}"
        return UserError(
            f"{path}: {os.strerror(number)}", remedy=f"let {who} use it, or name another path"
        )
    if number in _NO_PATH and path:
        return UserError(f"{path}: {os.strerror(number)}", remedy="name another path")
    return None


@contextmanager
def convert_input_errors(key: str = "") -> Iterator[None]:
    """Turn ValueErrors and OSErrors of a block that only reads the user's input into UserErrors.

    ``key`` is prepended to messages that do not name it.
    """
    try:
        yield
    except UserError as error:
        if not key or key in str(error):
            raise
        raise UserError(str(error), key=key) from error
    except ValueError as error:
        raise UserError(str(error), key=key if key not in str(error) else "") from error
    except OSError as error:
        fault = find_user_error(error)
        if fault is None and not error.filename:
            raise
        raise UserError(str(fault or f"{error.filename}: {error.strerror}"), key=key) from error


@contextmanager
def begin_lines_of_errors(prefix: str) -> Iterator[None]:
    """Let every line of a UserError of the block begin with ``prefix``."""
    try:
        yield
    except UserError as error:
        raise UserError("\n".join(prefix + line for line in str(error).splitlines())) from error


@contextmanager
def name_file_in_errors(file: str | os.PathLike[str]) -> Iterator[None]:
    """Let an OSError of a block that writes to ``file`` name it, which ``os.write`` does not do."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(file)) from error


def read_text(file: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file of the user's, without a byte-order mark.

    UserError naming the file, and the line of a byte that is not UTF-8, if it cannot be read.
    """
    return decode_text(read_bytes(file), file)


def read_bytes(file: str | os.PathLike[str]) -> bytes:
    """The content of a file of the user's. UserError if it cannot be read, and for a device, which
    may have no end.
    """
    try:
        with open(file, "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise UserError(f"cannot read {os.fspath(file)}: it is no ordinary file")
            return opened.read()
    except OSError as error:
        raise UserError(f"cannot read {os.fspath(file)}: {error.strerror}") from error


def decode_text(data: bytes, file: str | os.PathLike[str]) -> str:
    """``read_text`` of the bytes ``data``, which were read from ``file``."""
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        line, byte = data.count(b"\n", 0, error.start) + 1, data[error.start]
        raise UserError(
            f"{os.fspath(file)} line {line} is no UTF-8 text: byte 0x{byte:02x}"
        ) from error


def read_json(file: str | os.PathLike[str]) -> Any:
    """The value in a JSON file of the user's. UserError naming the file if it is not valid JSON."""
    try:
        return json.loads(read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{os.fspath(file)} is not valid JSON: {error}") from error


def raise_all(problems: list[UserError]) -> None:
    """Raise the problems as one error with a line for each; return if there are none."""
    lines = dict.fromkeys(line for problem in problems for line in str(problem).splitlines())
    if lines:
        raise UserError("\n".join(lines))


def run_all_checks(*checks: Callable[[], object]) -> None:
    """Run all checks and raise the UserErrors of those that fail as one."""
    problems = []
    for check in checks:
        try:
            check()
        except UserError as error:
            problems.append(error)
    raise_all(problems)


@contextmanager
def convert_user_code_errors(what: str) -> Iterator[None]:
    """Turn what a block of the user's code raises into a UserError that names the line.

    This includes ``sys.exit``, which would end the thread or the event loop that runs the block. A
    KeyboardInterrupt on the main thread is a Ctrl-C and passes. For code that ends the process,
    see ``user_code_running_in``.
    """
    _running.append(what)
    _note_running()
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        on_main = threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt) and on_main:
            raise
        line = user_line_of(error)
        place = f" ({line})" if line else ""
        if isinstance(error, SystemExit):
            problem = f"it calls sys.exit({'' if error.code is None else repr(error.code)})"
            remedy = "; raise an error instead, or guard a script by if __name__ == '__main__'"
            raise UserError(f"{what}: {problem}{place}{remedy}") from error
        raise UserError(f"{what}: {type(error).__name__}: {_first_line(error)}{place}") from error
    finally:
        _running.remove(what)
        _note_running()


def open_user_code_note() -> Callable[[], None]:
    """Open a file of this process, in which ``convert_user_code_errors`` notes what is running, so
    that ``user_code_running_in`` knows it after the process has died. The returned function removes
    it."""
    for old in Path(_NOTES).glob(f"{_NOTE}*"):
        if not Path("/proc", old.name.removeprefix(_NOTE)).exists():
            with suppress(OSError):  # another user's
                old.unlink()
    path = Path(_NOTES, f"{_NOTE}{os.getpid()}")
    # Everybody may write there, so what is there already is not opened.
    path.unlink(missing_ok=True)
    _note.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))

    def end() -> None:
        os.close(_note.pop())
        path.unlink(missing_ok=True)

    return end


def user_code_running_in(pid: int) -> str:
    """``, while this ran: WHAT`` of a process of this user and host that has ended within
    ``convert_user_code_errors``, for the end of a message; empty if it did not, or noted nothing.
    """
    path, flags = Path(_NOTES, f"{_NOTE}{pid}"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with open(path, opener=lambda name, _: os.open(name, flags), errors="replace") as file:
            about = os.fstat(file.fileno())
            ours = about.st_uid == os.geteuid() and stat.S_ISREG(about.st_mode)
            what = file.read(_NOTE_BYTES).strip() if ours else ""
    except OSError:
        return ""
    return f", while this ran: {what.removesuffix(' failed')}" if what else ""


def _note_running() -> None:
    for descriptor in _note:
        text = (_running[-1] if _running else "").encode(errors="replace")
        os.pwrite(descriptor, text[:_NOTE_BYTES].ljust(_NOTE_BYTES), 0)


def nearest_name(name: object, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that is most like ``name``; None where the similarity of all of them, from 0
    to 1 (``difflib``), is below ``cutoff``.
    """
    return next(iter(get_close_matches(str(name), list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the end of a message; empty where no known name is similar."""
    near = nearest_name(name, known)
    return "" if near is None else f"; did you mean {near!r}?"


def is_user_defined(function: object) -> bool:
    """Whether a function or class is defined outside this package."""
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] != __name__.partition(".")[0]


def describe_location(function: object) -> str:
    """``NAME (FILE line N)`` of a function, a class or a callable object; only the name if its
    source is not known.
    """
    code: Any = function if hasattr(function, "__qualname__") else type(function)
    name = getattr(code, "__qualname__", str(code))
    try:
        code = inspect.unwrap(code)
        return f"{name} ({inspect.getsourcefile(code)} line {inspect.getsourcelines(code)[1]})"
    except (OSError, TypeError, ValueError):
        return name


def user_line_of(error: BaseException) -> str:
    """``FILE line N`` of the innermost frame outside this package and libraries, or ""."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename} line {error.lineno}"
    own, found = os.path.dirname(__file__), ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((own, "<", sys.prefix, sys.base_prefix)):
            found = f"{frame.filename} line {frame.lineno}"
    return found


def is_user_code_mistake(error: BaseException) -> bool:
    """Whether ``error`` comes from code outside this package, or from a library that it calls, and
    another start would meet it again: no error of this package's kinds, no failure of the system
    (``OSError``), of memory, or of torch's communication, which fails where another process has
    died.
    """
    if not is_user_defined(type(error)) or isinstance(error, (OSError, MemoryError)):
        return False
    own = os.path.dirname(__file__)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(own) or _TORCHS_GROUPS in frame.filename:
            return False
        if not frame.filename.startswith(("<", sys.prefix, sys.base_prefix)):
            return True
    return False


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
