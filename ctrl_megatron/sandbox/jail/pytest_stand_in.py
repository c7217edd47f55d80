"""The part of pytest that tests use, for the judge, which has no pytest. ``collection`` finds and
runs the tests that are written with it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pathlib
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import TracebackType
from typing import Any, NoReturn

from ctrl_megatron.sandbox.jail.checks import count_check
from ctrl_megatron.sandbox.jail.failures import Skipped

_RELATIVE, _ABSOLUTE = 1e-6, 1e-12
"""The defaults of pytest."""
_NUMBERS = (int, float, complex, Decimal, Fraction)
FIXTURE, MARKS = "_ctrl_fixture", "_ctrl_marks"


def install_pytest_stand_in() -> None:
    """Make ``import pytest`` return this module's names in this process."""
    module = types.ModuleType("pytest")
    vars(module).update({name: globals()[name] for name in NAMES})
    sys.modules["pytest"] = module


class ExceptionInfo:
    """An expected exception, once it was raised."""

    value: BaseException

    @property
    def type(self) -> type[BaseException]:
        return type(self.value)

    @property
    def typename(self) -> str:
        return type(self.value).__name__

    def match(self, pattern: str | re.Pattern[str]) -> bool:
        assert re.search(pattern, str(self.value)), f"{pattern!r} is not in {str(self.value)!r}"
        return True


class _Raises:
    def __init__(self, expected: Any, match: str | re.Pattern[str] | None) -> None:
        self._expected, self._match = expected, match
        self._info = ExceptionInfo()

    def __enter__(self) -> ExceptionInfo:
        return self._info

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        count_check()
        if kind is None or error is None:
            fail(f"nothing was raised, expected {self._expected}")
        if not issubclass(kind, self._expected):
            return False
        self._info.value = error
        if self._match is not None:
            self._info.match(self._match)
        return True


def raises(
    expected_exception: Any,
    *call: Any,
    match: str | re.Pattern[str] | None = None,
    **named: Any,
) -> Any:
    """Require that a ``with`` block, or a call of the given function, raises the exception."""
    block = _Raises(expected_exception, match)
    if not call:
        return block
    with block as info:
        call[0](*call[1:], **named)
    return info


def warns(
    expected_warning: Any = Warning, *call: Any, match: str | None = None, **named: Any
) -> Any:
    """Require that a ``with`` block, or a call of the given function, warns."""
    block = _warns(expected_warning, match)
    if not call:
        return block
    with block:
        return call[0](*call[1:], **named)


@contextlib.contextmanager
def _warns(expected_warning: Any, match: str | None) -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen
    count_check()
    kinds = [w for w in seen if issubclass(w.category, expected_warning)]
    found = [w for w in kinds if match is None or re.search(match, str(w.message))]
    if not found:
        fail(f"no warning of {expected_warning}")


def deprecated_call() -> Any:
    """Require that a ``with`` block warns of something deprecated."""
    return warns((DeprecationWarning, PendingDeprecationWarning))


class approx:
    """Equals numbers close to ``expected``, alone or in lists, tuples and dicts."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, expected: Any, rel: Any = None, abs: Any = None, nan_ok: bool = False
    ) -> None:
        self.expected = expected
        self._rel, self._abs, self._nan_ok = rel, abs, nan_ok

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"

    def __eq__(self, got: Any) -> bool:
        return self._near(got, self.expected)

    def _near(self, got: Any, wanted: Any) -> bool:
        if isinstance(wanted, Mapping):
            same = isinstance(got, Mapping) and got.keys() == wanted.keys()
            return same and all(self._near(got[key], wanted[key]) for key in wanted)
        if isinstance(wanted, (list, tuple)):
            same = isinstance(got, (list, tuple)) and len(got) == len(wanted)
            return same and all(map(self._near, got, wanted))
        if isinstance(wanted, bool) or not isinstance(wanted, _NUMBERS):
            return got == wanted
        if not isinstance(got, _NUMBERS):
            return False
        if wanted != wanted or got != got:
            return self._nan_ok and wanted != wanted and got != got
        return got == wanted or self._is_within(got, wanted)

    def _is_within(self, got: Any, wanted: Any) -> bool:
        if abs(wanted) == float("inf") or abs(got) == float("inf"):
            return False
        if isinstance(got, Decimal) != isinstance(wanted, Decimal):
            got, wanted = float(got), float(wanted)
        kind: Any = Decimal if isinstance(wanted, Decimal) else float
        tolerance = kind(_ABSOLUTE if self._abs is None else self._abs)
        if self._rel is not None or self._abs is None:
            relative = kind(_RELATIVE if self._rel is None else self._rel) * kind(abs(wanted))
            tolerance = max(tolerance, relative)
        return abs(got - wanted) <= tolerance


def fail(reason: str = "", pytrace: bool = True) -> NoReturn:
    raise AssertionError(reason)


def skip(reason: str = "", **_options: Any) -> NoReturn:
    """Skip the test: it has not passed."""
    raise Skipped(reason)


def importorskip(modname: str, *_options: Any, **_named: Any) -> Any:
    try:
        return importlib.import_module(modname)
    except ImportError as error:
        raise Skipped(str(error)) from error


def main(*_arguments: Any, **_named: Any) -> int:
    """Do nothing: the judge runs the tests."""
    return 0


# --- marks, parameters and fixtures ---------------------------------------------------------------


@dataclass(frozen=True)
class Parameters:
    """One set of values of ``parametrize``."""

    values: tuple[Any, ...]
    marks: tuple[Any, ...] = ()
    id: str | None = None


def param(*values: Any, marks: Any = (), id: str | None = None) -> Parameters:
    return Parameters(values, tuple(marks) if isinstance(marks, (list, tuple)) else (marks,), id)


@dataclass(frozen=True)
class Mark:
    """A mark of a test, such as ``pytest.mark.skipif(...)``."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if (
            len(arguments) == 1
            and not named
            and isinstance(arguments[0], (types.FunctionType, type))
        ):
            marked = arguments[0]
            setattr(marked, MARKS, [*getattr(marked, MARKS, ()), self])
            return marked
        return Mark(self.name, arguments, named)


class _Marks:
    def __getattr__(self, name: str) -> Mark:
        return Mark(name)


mark = _Marks()


@dataclass(frozen=True)
class Fixture:
    """A function that makes a value for tests."""

    function: Callable[..., Any]
    scope: str = "function"
    params: tuple[Any, ...] | None = None
    autouse: bool = False
    name: str = ""


def fixture(function: Any = None, **options: Any) -> Any:
    def declare(given: Callable[..., Any]) -> Callable[..., Any]:
        params = options.get("params")
        declared = Fixture(
            given,
            str(options.get("scope", "function")),
            None if params is None else tuple(params),
            bool(options.get("autouse", False)),
            options.get("name") or given.__name__,
        )
        setattr(given, FIXTURE, declared)
        return given

    return declare if function is None else declare(function)


@dataclass
class Request:
    """The fixture ``request``: ``param`` is the current value of a fixture with parameters."""

    param: Any = None
    function: Any = None
    cls: Any = None
    instance: Any = None
    node: Any = None
    finalizers: list[Callable[[], Any]] | None = None
    get: Callable[[str], Any] | None = None

    def addfinalizer(self, finalizer: Callable[[], Any]) -> None:
        assert self.finalizers is not None
        self.finalizers.append(finalizer)

    def getfixturevalue(self, name: str) -> Any:
        assert self.get is not None
        return self.get(name)


class MonkeyPatch:
    """Changes that are undone after the test."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def setattr(self, target: Any, name: Any, value: Any = ..., raising: bool = True) -> None:
        if value is ...:
            path, value = target, name
            module, _, name = path.rpartition(".")
            target = _imported(module)
        old = getattr(target, name, ...) if not raising else getattr(target, name)
        undo = (
            (lambda: delattr(target, name)) if old is ... else (lambda: setattr(target, name, old))
        )
        setattr(target, name, value)
        self._undo.append(undo)

    def delattr(self, target: Any, name: str, raising: bool = True) -> None:
        if raising or hasattr(target, name):
            old = getattr(target, name)
            delattr(target, name)
            self._undo.append(lambda: setattr(target, name, old))

    def setitem(self, mapping: Any, key: Any, value: Any) -> None:
        old = mapping.get(key, ...)
        undo = (lambda: mapping.pop(key)) if old is ... else (lambda: mapping.__setitem__(key, old))
        mapping[key] = value
        self._undo.append(undo)

    def delitem(self, mapping: Any, key: Any, raising: bool = True) -> None:
        if raising or key in mapping:
            old = mapping[key]
            del mapping[key]
            self._undo.append(lambda: mapping.__setitem__(key, old))

    def setenv(self, name: str, value: Any, prepend: str | None = None) -> None:
        old = os.environ.get(name)
        self.setitem(os.environ, name, f"{value}{prepend}{old}" if prepend and old else str(value))

    def delenv(self, name: str, raising: bool = True) -> None:
        self.delitem(os.environ, name, raising)

    def chdir(self, path: Any) -> None:
        before = os.getcwd()
        os.chdir(path)
        self._undo.append(lambda: os.chdir(before))

    def syspath_prepend(self, path: Any) -> None:
        sys.path.insert(0, str(path))
        self._undo.append(lambda: sys.path.remove(str(path)))

    @contextlib.contextmanager
    def context(self) -> Iterator[MonkeyPatch]:
        inner = MonkeyPatch()
        try:
            yield inner
        finally:
            inner.undo()

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def _imported(path: str) -> Any:
    found: Any = None
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ImportError(path)


@dataclass(frozen=True)
class Captured:
    """The text printed to standard output and standard error."""

    out: str
    err: str

    def __iter__(self) -> Iterator[str]:
        return iter((self.out, self.err))


class Capture:
    """The fixture ``capsys``."""

    def __init__(self) -> None:
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()

    def readouterr(self) -> Captured:
        """The text printed since the last call."""
        texts = []
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.StringIO)
            texts.append(stream.getvalue())
            stream.seek(0)
            stream.truncate()
        return Captured(*texts)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        sys.stdout, sys.stderr = self._before


class CaptureLog:
    """The fixture ``caplog``."""

    def __init__(self) -> None:
        import logging  # only where a test looks at logs: it would add to the memory to fork

        self._logging = logging
        self.records: list[logging.LogRecord] = []
        self._levels: list[tuple[logging.Logger, int]] = []
        self.handler = logging.Handler()
        self.handler.emit = self.records.append  # type: ignore[method-assign]
        logging.root.addHandler(self.handler)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]

    @property
    def text(self) -> str:
        return "".join(f"{r.levelname} {r.name}: {r.getMessage()}\n" for r in self.records)

    @property
    def record_tuples(self) -> list[tuple[str, int, str]]:
        return [(r.name, r.levelno, r.getMessage()) for r in self.records]

    def clear(self) -> None:
        self.records.clear()

    def set_level(self, level: Any, logger: str | None = None) -> None:
        """Log from a level on until the test ends."""
        found = self._logging.getLogger(logger)
        self._levels.append((found, found.level))
        found.setLevel(level)

    @contextlib.contextmanager
    def at_level(self, level: Any, logger: str | None = None) -> Iterator[None]:
        found = self._logging.getLogger(logger)
        before = found.level
        found.setLevel(level)
        try:
            yield
        finally:
            found.setLevel(before)

    def close(self) -> None:
        self._logging.root.removeHandler(self.handler)
        for logger, level in reversed(self._levels):
            logger.setLevel(level)


def _monkeypatch() -> Iterator[Any]:
    patch = MonkeyPatch()
    yield patch
    patch.undo()


def _capsys() -> Iterator[Any]:
    capture = Capture()
    try:
        yield capture
    finally:
        capture.close()


def _caplog() -> Iterator[Any]:
    capture = CaptureLog()
    try:
        yield capture
    finally:
        capture.close()


def _tmp_path(prefix: str = "tmp") -> pathlib.Path:
    import tempfile  # most tests need no folder

    return pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=os.getcwd()))


def _recwarn() -> Iterator[Any]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen


@dataclass(frozen=True)
class _TemporaryFolders:
    def mktemp(self, basename: str, numbered: bool = True) -> pathlib.Path:
        return _tmp_path(basename)


BUILTIN_FIXTURES: dict[str, Fixture] = {
    "monkeypatch": Fixture(_monkeypatch),
    "capsys": Fixture(_capsys),
    "capfd": Fixture(_capsys),
    "caplog": Fixture(_caplog),
    "tmp_path": Fixture(_tmp_path),
    "tmpdir": Fixture(_tmp_path),
    "tmp_path_factory": Fixture(_TemporaryFolders, scope="session"),
    "recwarn": Fixture(_recwarn),
}
NAMES = (
    *("ExceptionInfo", "MonkeyPatch", "approx", "deprecated_call", "fail", "fixture"),
    *("importorskip", "main", "mark", "param", "raises", "skip", "warns"),
)
"""The names of pytest that tests may use."""
