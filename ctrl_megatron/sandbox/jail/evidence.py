"""What a test has checked of the program, counted in the judge while the test runs.

A test passes only if one of its checks was evaluated on something that came from the program, and
none that failed was swallowed. Texts that ``datasets.marking`` has marked say so here, under the
name ``NAME``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ctrl_megatron.sandbox.jail.remote_calls import is_of_program

Value = TypeVar("Value")

NAME = "_evidence"
"""Name of the ``Evidence`` in the tests' namespace."""
CHANGING = "_changing"
"""Name of the function that wraps a function of the program so that a call changes the test's own
arguments as it changes the program's copies."""
MADE_IN_CALL, MADE_BY_ARGUMENT, MADE_BEFORE = range(3)
"""What a check is about: calls that it makes itself; also what a function of the tests was given,
where that came from the program; also what the program made before."""


class Evidence:
    """Of one test at a time. ``calls`` says how often the test has asked something of the program.

    ``setup_called``: the setup kept something that the program made.
    """

    def __init__(self, calls: Callable[[], int]) -> None:
        self._calls = calls
        self.setup_called = False
        self.begin()

    def begin(self) -> None:
        """A test begins."""
        self._evaluated = self._failed = self._unsettled = False
        self._depth = 0

    def missing(self, *, marked: bool) -> str | None:
        """Why a test that ended well does not pass; None where it does. A test that is not
        ``marked`` checks what it calls.
        """
        if self._failed or self._unsettled:
            return "a check failed and the test went on"
        if not (self._evaluated if marked else self._calls()):
            return "no check of the test was evaluated on anything that came from the program"
        return None

    def now(self) -> int:
        """What ``seen`` and ``passed`` take for their ``before``."""
        return self._calls()

    def seen(self, before: int, about: int, value: Value) -> Value:
        """``value``, on which a check depends, was evaluated."""
        if self._calls() > before:
            self._evaluated = True
        elif about == MADE_BEFORE or (about == MADE_BY_ARGUMENT and self._depth):
            self._evaluated |= self._called()
        return value

    def held(self, value: Any) -> bool:
        """Whether ``value``, which is asserted, is true."""
        truth = bool(value)
        self._failed |= not truth
        self._unsettled &= not truth
        return truth

    def passed(self, before: int, about: int, value: Value) -> Value:
        """A function that asserts has returned ``value``."""
        self._unsettled = False
        return self.seen(before, about, value)

    def raised(self) -> None:
        """The exception that was expected of a block has come."""
        self._failed = False
        self._evaluated |= self._called()

    def caught(self, counts: bool, answers: bool, checks: bool) -> None:
        """A handler has caught an exception. ``counts``: the test expects one of the program there.
        ``answers``: the handler does something about it; a check must hold after that. ``checks``:
        what it guards has checks.
        """
        error = sys.exception()
        failed = isinstance(error, AssertionError) and not is_of_program(error)
        if failed or (checks and not counts):
            self._failed, self._unsettled = not answers, answers
        elif counts:
            self._evaluated |= self._called()

    def about(self, function: Any) -> Any:
        """``function`` of the tests, which is given something of the program."""
        if not callable(function):
            return function

        @functools.wraps(function, updated=())
        def given(*arguments: Any, **named: Any) -> Any:
            self._depth += 1
            try:
                return function(*arguments, **named)
            finally:
                self._depth -= 1

        return given

    def _called(self) -> bool:
        return self.setup_called or self._calls() > 0
