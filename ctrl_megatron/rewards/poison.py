"""Programs that know nothing of a problem, and the tests that such programs pass.

A test that every program of a group passes says nothing about a program: the groups return one
constant each, return objects that agree with everything, or empty their arguments.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from ctrl_megatron.rewards.grading import test_label
from ctrl_megatron.sandbox.limits import CANNOT_JUDGE, NOT_RUN, UNCHECKED
from ctrl_megatron.sandbox.wire import EvalTestCase

MARK = "# knows nothing of the problem"
"""First line of every program of a group."""
_CONSTANTS = ("None", "7", "'x'", "[]")
_RETURNS = """
def {name}(*arguments, **named):
    return {value}
"""
# The name is a class, so that calls of it, objects of it and its own attributes are the same thing.
# An object derived from a number is data wherever the tests compare it; the other one is not.
_OBJECTS = """
class _Kind(type):
    def __getattr__(cls, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return cls()

class {name}({base}, metaclass=_Kind):
    def __new__(cls, *arguments, **named):
        return super().__new__(cls)
    def __init__(self, *arguments, **named):
        pass
    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self
    def _self(self, *arguments, **named):
        return self
    __call__ = __getitem__ = __enter__ = _self
    def __exit__(self, *arguments):
        return False
    def __setitem__(self, *arguments):
        pass
    def __delitem__(self, *arguments):
        pass
    def __iter__(self):
        return iter({items})
    def __len__(self):
        return {length}
"""
_AGREES = """
    def _yes(self, *arguments):
        return True
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = _yes
    __hash__ = object.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _self
    __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _self
    __and__ = __or__ = __xor__ = __neg__ = __pos__ = __abs__ = __invert__ = __iadd__ = _self
    def __int__(self):
        return 1
    __index__ = __int__
    def __float__(self):
        return 1.0
    def __str__(self):
        return "x"
    __repr__ = __str__
"""
_EMPTIES = """
def {name}(*arguments, **named):
    for value in (*arguments, *named.values()):
        try:
            value.clear()
        except Exception:
            pass
    return {value}
"""


@dataclass(frozen=True, slots=True)
class TrivialProgramGroup:
    """Programs of one kind that know nothing of the problem, for example such as return a constant:
    a test that all of them pass does not count."""

    what: str
    """Completes "passes for programs that"."""
    templates: tuple[str, ...]
    """The text of each program for one ``{name}``."""

    def programs(self, names: Sequence[str]) -> list[str]:
        return [
            "\n".join([MARK, *(text.replace("{name}", name) for name in names)])
            for text in self.templates
        ]


def _filled(template: str, **values: str) -> str:
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", value)
    return template


GROUPS = (
    TrivialProgramGroup("return a constant", tuple(_filled(_RETURNS, value=c) for c in _CONSTANTS)),
    TrivialProgramGroup(
        "return objects that agree with everything",
        (
            _filled(_OBJECTS, base="int", items="()", length="0"),
            _filled(_OBJECTS, base="object", items="(self,)", length="1") + _AGREES,
        ),
    ),
    TrivialProgramGroup(
        "empty their arguments",
        tuple(
            _filled(_EMPTIES, value=value)
            # One result is true: a test may want a false one.
            for value in ("None", "7", "arguments[0] if arguments else None", "[]")
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TriviallyPassedTests:
    """The tests of a problem, and those that the groups of programs rule out."""

    names: tuple[str, ...]
    """Text or name of each test."""
    uncounted: Mapping[int, str]
    """Position of a test that does not count -> the programs that it passes for."""
    sure: bool
    """False where a program ran out of time, which a busy machine can cause."""


_NOTHING = "do anything: it checks nothing, or cannot be run"


def _is_hollow(case: EvalTestCase) -> bool:
    """Whether a test ended without a check, or could not be run."""
    reason = str((case.test_info or {}).get("reason", ""))
    return reason == UNCHECKED or reason.startswith(f"{CANNOT_JUDGE}: {NOT_RUN}")


async def find_trivially_passed_tests(
    names: Sequence[str], run: Callable[[str], Awaitable[Sequence[EvalTestCase]]]
) -> TriviallyPassedTests:
    """The tests that every program of a group passes. ``names`` are those that a program has to
    define; ``run`` judges a program on all tests. A group ends with the first program that leaves
    no test to all of it.
    """
    known, uncounted, sure = tuple[str, ...](), dict[int, str](), True
    for group in GROUPS:
        left, hollow = None, set[int]()
        for program in group.programs(names):
            cases = await run(program)
            reported = tuple(map(test_label, cases))
            # Unit tests that a program keeps from being collected are no passed ones.
            passed = {n for n, case in enumerate(cases) if case.passed or _is_hollow(case)}
            hollow = {n for n in passed if not cases[n].passed}
            if len(reported) > len(known):
                known = reported
            if len(reported) < len(known):
                passed = {n for n in passed if reported[n] == known[n]}
            sure = sure and not any(case.timed_out for case in cases)
            left = passed if left is None else left & passed
            if not left:
                break
        for n in sorted(left or ()):
            uncounted.setdefault(n, _NOTHING if n in hollow else group.what)
    return TriviallyPassedTests(names=known, uncounted=uncounted, sure=sure)
