"""The one call that a simple test is certain to make, known before the test runs.

A test that is one assert and names nothing but one stub, once, is rehearsed: run until the stub is
called. Nothing else can have an effect or come out differently the second time, and no second call
can follow. Calls of such tests go to the program together, which saves a wake-up of both processes
for each; any other test calls when it gets there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import CodeType
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of a stub."""

    name: str
    arguments: tuple[Any, ...]
    named: dict[str, Any]


class _Called(BaseException):
    """Ends a rehearsal with the call."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


class Rehearsal:
    """Finds the certain calls of tests that call the stubs ``names``."""

    def __init__(self, names: Iterable[str]) -> None:
        self._namespace: dict[str, Any] = {name: _caught(name) for name in names}

    def call(self, test: str, code: CodeType, stubs: Collection[str]) -> Call | None:
        """The call that ``code``, compiled from ``test``, is certain to make, if it is one of
        ``stubs``; None where none is certain.
        """
        if not _names_once(test, code, stubs):
            return None
        try:
            exec(code, self._namespace)
        except _Called as found:
            return found.call
        except Exception:
            return None
        return None


def _names_once(test: str, code: CodeType, stubs: Collection[str]) -> bool:
    if not test.startswith("assert ") or any(mark in test for mark in ("\n", ";", ":=")):
        return False
    if len(code.co_names) != 1 or code.co_names[0] not in stubs:
        return False
    if any(isinstance(constant, CodeType) for constant in code.co_consts):
        return False
    return test.count(code.co_names[0]) == 1


def _caught(name: str) -> Callable[..., Any]:
    def stub(*arguments: Any, **named: Any) -> Any:
        raise _Called(Call(name, arguments, named))

    return stub
