"""What counts as equal: what a program wrote and what is expected of it, and what a function
returned and what it should, by the rule that the row or its data set names. Both are compared
outside the program.

A set's rule accepts what the set's own judge means to accept and no more. A number is finite,
written in ASCII digits and compared by its exact value, so that neither ``inf`` nor six digits of a
hundred pass for another number; no rule but ``sandbox_fusion`` ignores capitals, unless the record
says so.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from typing import Any, Literal

_SPACE = " \t\r\v\f"
"""White space within a line. Other characters that look empty are text."""
_WORD = re.compile(rf"[^{_SPACE}\n]+")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
"""No number has an exponent of more digits; a hash of hexadecimal digits may look like one."""
_INTEGER = re.compile(r"[+-]?[0-9]+")
_CODE = re.compile(r"[+-]?(?:0[0-9]|[0-9]+[eE][0-9])")
"""Beginnings of words that are no numbers but codes: one with leading zeros, and digits around an
``e``, for numbers are printed as ``1e+20``, ``1e-05`` or ``1.0E10``.
"""
_EXACT = Context(prec=40, Emax=MAX_EMAX, Emin=MIN_EMIN)
"""Forty digits of a difference are far more than any tolerance looks at."""
_TOLERANT = re.compile(r"(float|absolute|relative):([0-9]+(?:\.[0-9]+)?(?:e-[0-9]{1,2})?)")
_LARGEST_TOLERANCE = Decimal("0.1")
_FUSION_RELATIVE, _FUSION_SMALLEST = 1e-5, 1e-10
_SHOWN = 200
_REMEMBERED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How outputs are compared, as sequences of units of which each must be equal; and how far a
    float that a function returned may be from the expected one.
    """

    name: str
    """What a row calls it by."""
    unit: Literal["line", "word"]
    units: Callable[[str], list[str]]
    equal: Callable[[str, str], bool]
    """Of two units that differ as text: whether the first is as good as the expected second."""
    result_tolerance: tuple[float, float] = (0.0, 0.0)
    """Of floats among results: absolute, and relative to the expected one; the larger counts."""


def difference(got: str, want: str, rule: Rule, *, ignore_case: bool = False) -> str | None:
    """What distinguishes the output ``got`` from ``want``, or None where ``rule`` accepts it. With
    ``ignore_case`` capitals do not count.
    """
    if ignore_case:
        got, want = got.lower(), want.lower()
    given, expected = rule.units(got), rule.units(want)
    if given == expected:
        return None
    if len(given) != len(expected):
        return f"{len(given)} {rule.unit}s of output, expected {len(expected)}"
    return _first_difference(given, expected, rule)


def beginning_difference(got: str, want: str, rule: Rule) -> str | None:
    """What distinguishes every output that begins with ``got`` from ``want``, or None where one of
    them may be accepted. The last unit may go on unless something stands behind it.
    """
    end = max(map(got.rfind, "\n" if rule.unit == "line" else f"{_SPACE}\n"))
    given, expected = rule.units(got[: end + 1]), rule.units(want)
    both = min(len(given), len(expected))
    if reason := _first_difference(given[:both], expected[:both], rule):
        return reason
    return f"more {rule.unit}s of output, expected {both}" if len(given) > both else None


def _first_difference(got: Sequence[str], want: Sequence[str], rule: Rule) -> str | None:
    for number, (left, right) in enumerate(zip(got, want, strict=True), 1):
        if left != right and not rule.equal(left, right):
            told = f"{left[:_SHOWN]!r}, expected {right[:_SHOWN]!r}"
            return f"{rule.unit} {number} differs: {told}"
    return None


def rule_named(name: Any) -> Rule:
    """The rule that a row calls ``name``. Raises ``ValueError`` that names all."""
    if isinstance(name, str) and name in RULES:
        return RULES[name]
    if isinstance(name, str) and (parts := _TOLERANT.fullmatch(name)):
        tolerance = Decimal(parts[2])
        if 0 < tolerance <= _LARGEST_TOLERANCE:
            return _tolerant(name, parts[1], tolerance)
    known = ", ".join(RULES)
    raise ValueError(
        f"comparison {name!r:.80} is unknown: use {known}, or float:T, absolute:T, relative:T "
        f"with a tolerance of at most {_LARGEST_TOLERANCE}, such as float:1e-6"
    )


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _lines_as_written(text: str) -> list[str]:
    lines = [line.rstrip(_SPACE) for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _stripped_lines(text: str) -> list[str]:
    lines = [line.strip(_SPACE) for line in text.strip(f"{_SPACE}\n").split("\n")]
    return lines if any(lines) else []


def _lines_with_words(text: str) -> list[str]:
    return [line for line in _stripped_lines(text) if line]


def _all_words(equal: Callable[[str, str], bool]) -> Callable[[str, str], bool]:
    """Of two lines: their words are equal."""

    def equal_lines(got: str, want: str) -> bool:
        left, right = _words(got), _words(want)
        return len(left) == len(right) and all(map(equal, left, right))

    return equal_lines


def _same_value(got: str, want: str) -> bool:
    numbers = _DECIMAL.fullmatch(got) and _DECIMAL.fullmatch(want)
    return numbers is not None and Decimal(got) == Decimal(want)


def _within(absolute: Decimal, relative: Decimal) -> Callable[[str, str], bool]:
    """Of two words: equal, or numbers that differ by at most the larger tolerance; two integers by
    nothing.
    """

    def equal(got: str, want: str) -> bool:
        if got == want:
            return True
        if not all(_DECIMAL.fullmatch(word) and not _CODE.match(word) for word in (got, want)):
            return False
        left, right = Decimal(got), Decimal(want)
        if left == right:
            return True
        if _INTEGER.fullmatch(got) and _INTEGER.fullmatch(want):
            return False
        most = max(absolute, _EXACT.multiply(relative, _EXACT.abs(right)))
        return _EXACT.abs(_EXACT.subtract(left, right)) <= most

    return equal


@functools.lru_cache(_REMEMBERED)
def _tolerant(name: str, kind: str, tolerance: Decimal) -> Rule:
    absolute = tolerance if kind != "relative" else Decimal(0)
    relative = tolerance if kind != "absolute" else Decimal(0)
    return Rule(
        name=name,
        unit="word",
        units=_words,
        equal=_within(absolute, relative),
        result_tolerance=(float(absolute), float(relative)),
    )


def _fusion_lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.lower().strip().split("\n")]
    return lines if any(lines) else []


def _fusion_close(got: str, want: str) -> bool:
    try:
        left, right = float(got), float(want)
    except ValueError:
        return False
    if not (math.isfinite(left) and math.isfinite(right)):
        return left == right
    return abs(left - right) / max(abs(right), _FUSION_SMALLEST) < _FUSION_RELATIVE


_contests_words = _within(Decimal("1e-5"), Decimal(0))
STRICT = Rule(name="strict", unit="line", units=_lines_as_written, equal=operator.eq)
"""For rows that name none."""
TOKENS = Rule(name="tokens", unit="word", units=_words, equal=operator.eq)
LIVE_CODE_BENCH = Rule(
    name="livecodebench",
    unit="line",
    units=_stripped_lines,
    equal=_all_words(_same_value),
    # LeetCode, where its functions come from, accepts answers within 1e-5.
    result_tolerance=(1e-5, 0.0),
)
CODE_CONTESTS = Rule(name="code_contests", unit="word", units=_words, equal=_contests_words)
APPS = Rule(name="apps", unit="line", units=_lines_with_words, equal=_all_words(_contests_words))
SANDBOX_FUSION = Rule(name="sandbox_fusion", unit="line", units=_fusion_lines, equal=_fusion_close)
"""That service's own rule with its holes, to compare services with."""
RULES = {
    rule.name: rule
    for rule in (STRICT, TOKENS, LIVE_CODE_BENCH, CODE_CONTESTS, APPS, SANDBOX_FUSION)
}

RESULT_CHECK = """
from builtins import all as _all, dict as _dict, float as _float, int as _int, len as _len
from builtins import isinstance as _isinstance, list as _list, max as _max, abs as _abs
from builtins import tuple as _tuple, type as _type, zip as _zip
from math import inf, nan
def _same(got, wanted, absolute, relative):
    kind = _type(wanted)
    if kind is _list or kind is _tuple:
        return (
            _isinstance(got, (_list, _tuple))
            and _len(got) == _len(wanted)
            and _all(_same(g, w, absolute, relative) for g, w in _zip(got, wanted))
        )
    if kind is _dict:
        return (
            _isinstance(got, _dict)
            and got.keys() == wanted.keys()
            and _all(_same(got[key], wanted[key], absolute, relative) for key in wanted)
        )
    if kind is _float and (_type(got) is _float or _type(got) is _int):
        most = _max(absolute, relative * _abs(wanted))
        return got == wanted or wanted - most <= got <= wanted + most
    return got == wanted
def _matches(got, wanted, absolute=0, relative=0, first=False):
    if first and _type(wanted) is _list and wanted and _same(got, wanted[0], absolute, relative):
        return True
    return _same(got, wanted, absolute, relative)
"""
"""Python text for the judge: whether a function's result is the expected one, where tuples count as
lists and floats may be off by the larger of two tolerances. ``first`` also accepts the expected
list's first item.
"""
RESULT_CHECK_NAMES = (
    *(
        "_abs",
        "_all",
        "_dict",
        "_float",
        "_int",
        "_isinstance",
        "_len",
        "_list",
        "_max",
        "_tuple",
        "_type",
        "_zip",
    ),
    *("_matches", "_same", "inf", "nan"),
)
