"""Records which checks of a test were evaluated on values of the program, while the test runs in
the judge.

A test passes only if at least one such check was evaluated, and no failed check was swallowed.
``datasets.marking`` inserts the calls of ``Evidence`` into the texts of the tests.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ctrl_megatron.sandbox.jail.exceptions import is_of_program

Value = TypeVar("Value")

NAME = "_evidence"
"""Name of the ``Evidence`` in the tests' namespace."""
CHANGING = "_changing"
"""Name of the function that wraps a function of the program so that a call changes the test's own
arguments as it changes the program's copies."""
MADE_IN_CALL, MADE_BY_ARGUMENT, MADE_BEFORE = range(3)
"""What a check is about. ``MADE_IN_CALL``: a value of a call inside the check.
``MADE_BY_ARGUMENT``: also an argument of the enclosing function of the tests, if the program
returned it. ``MADE_BEFORE``: also a value that the program returned earlier."""


class Evidence:
    """The evidence of the current test. ``calls`` returns the number of requests that the test has
    made to the program.

    ``setup_called`` is true if the setup kept a value of the program.
    """

    def __init__(self, calls: Callable[[], int]) -> None:
        self._calls = calls
        self.setup_called = False
        self.begin()

    def begin(self) -> None:
        """Begin a test."""
        self._evaluated = self._failed = self._unsettled = False
        self._depth = 0

    def missing(self, *, marked: bool) -> str | None:
        """The reason why a test that ended without exception does not pass; None if it passes. A
        test that is not ``marked`` checks the result of every call.
        """
        if self._failed or self._unsettled:
            return "a check failed and the test continued"
        if not (self._evaluated if marked else self._calls()):
            return "no check of the test was evaluated on anything that came from the program"
        return None

    def now(self) -> int:
        """The value for the argument ``before`` of ``seen`` and ``passed``."""
        return self._calls()

    def seen(self, before: int, about: int, value: Value) -> Value:
        """Record that ``value``, on which a check depends, was evaluated; returns it."""
        if self._calls() > before:
            self._evaluated = True
        elif about == MADE_BEFORE or (about == MADE_BY_ARGUMENT and self._depth):
            self._evaluated |= self._called()
        return value

    def held(self, value: Any) -> bool:
        """Record the truth of an asserted ``value``; returns it."""
        truth = bool(value)
        self._failed |= not truth
        self._unsettled &= not truth
        return truth

    def passed(self, before: int, about: int, value: Value) -> Value:
        """Record that an asserting function returned ``value``; returns it."""
        self._unsettled = False
        return self.seen(before, about, value)

    def raised(self) -> None:
        """Record that a block raised the expected exception."""
        self._failed = False
        self._evaluated |= self._called()

    def caught(self, counts: bool, answers: bool, checks: bool) -> None:
        """Record that a handler caught an exception. ``counts``: the test expects an exception of
        the program there. ``answers``: the handler reacts to the exception, so a later check has to
        hold. ``checks``: the guarded block contains checks.
        """
        error = sys.exception()
        failed = isinstance(error, AssertionError) and not is_of_program(error)
        if failed or (checks and not counts):
            self._failed, self._unsettled = not answers, answers
        elif counts:
            self._evaluated |= self._called()

    def about(self, function: Any) -> Any:
        """Wrap a ``function`` of the tests that gets a value of the program as an argument."""
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
