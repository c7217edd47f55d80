"""The one call that a simple test is certain to make, known before the test runs.

A test that is one assert and names nothing but one stub, once, is rehearsed: run until the stub is
called. Nothing else can have an effect or come out differently the second time, and no second call
can follow. Calls of such tests go to the program together, which saves a wake-up of both processes
for each; any other test calls when it gets there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
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


def certain_call(test: str, code: CodeType, stubs: Mapping[str, str]) -> Call | None:
    """The call that ``code``, compiled from ``test``, is certain to make; None where none is.

    ``stubs`` has the names that tests see and, for each, the function of the program.
    """
    if not _names_once(test, code, stubs):
        return None
    name = code.co_names[0]
    try:
        exec(code, {name: _caught(stubs[name])})
    except _Called as found:
        return found.call
    except Exception:
        return None
    return None


def _names_once(test: str, code: CodeType, stubs: Container[str]) -> bool:
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
