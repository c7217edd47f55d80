"""The part of pytest that tests use, for the judge, which has no pytest. ``datasets.unit_tests``
finds the tests and their parameters before.
"""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from types import TracebackType
from typing import Any, NoReturn, TypeVar

Value = TypeVar("Value")

_RELATIVE, _ABSOLUTE = 1e-6, 1e-12
"""The defaults of pytest."""
_NUMBERS = (int, float, complex, Decimal, Fraction)


def install() -> None:
    """Make ``import pytest`` return this module's names in this process."""
    module = types.ModuleType("pytest")
    vars(module).update({name: globals()[name] for name in NAMES})
    sys.modules["pytest"] = module


class ExceptionInfo:
    """An expected exception, once it was raised."""

    value: BaseException

    @property
    def type(self) -> type[BaseException]:
        """The exception's class."""
        return type(self.value)

    @property
    def typename(self) -> str:
        """The name of the exception's class."""
        return type(self.value).__name__

    def match(self, pattern: str | re.Pattern[str]) -> bool:
        """Assert that ``pattern`` occurs in the exception's text."""
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


class Skipped(Exception):
    """The test skipped itself: it has not passed."""


def fail(reason: str = "", pytrace: bool = True) -> NoReturn:
    """Fail the test."""
    raise AssertionError(reason)


def skip(reason: str = "", **_options: Any) -> NoReturn:
    """Skip the test: it has not passed."""
    raise Skipped(reason)


def importorskip(modname: str, *_options: Any, **_named: Any) -> Any:
    """Import a module, or skip the test."""
    try:
        return importlib.import_module(modname)
    except ImportError as error:
        raise Skipped(str(error)) from error


def param(*values: Any, **_options: Any) -> Any:
    """One set of parameters, for parameter lists that are computed when the test runs."""
    return values[0] if len(values) == 1 else values


def fixture(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """Accept the decorator. Tests that use a fixture are refused before they run."""
    return function or (lambda decorated: decorated)


class _Marks:
    """Accepts every mark and ignores it."""

    def __getattr__(self, _name: str) -> _Marks:
        return self

    def __call__(self, *arguments: Any, **_named: Any) -> Any:
        marked = arguments[0] if arguments else None
        return marked if isinstance(marked, (types.FunctionType, type)) else self


mark = _Marks()
NAMES = (
    *("ExceptionInfo", "approx", "fail", "fixture", "importorskip", "mark", "param", "raises"),
    "skip",
)
"""The names of pytest that tests may use."""
