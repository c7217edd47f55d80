"""Rules that compare a program's output with the expected output, and a function's result with the
expected result. The row or its data set names the rule. Both comparisons are made outside the
program.

The rule of a data set accepts what the set's own judge intends to accept, and no more. A number is
finite, written in ASCII digits and compared by its exact value, so that neither ``inf`` nor six
digits of a hundred are accepted for another number. Only ``sandbox_fusion`` ignores case, unless
the record requests it.
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
"""White space within a line. Other invisible characters count as text."""
_WORD = re.compile(rf"[^{_SPACE}\n]+")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
"""Numbers have at most three digits of exponent, because a hash of hexadecimal digits may look like
a longer one."""
_INTEGER = re.compile(r"[+-]?[0-9]+")
_CODE = re.compile(r"[+-]?(?:0[0-9]|[0-9]+[eE][0-9])")
"""Beginnings of words that are codes and not numbers: with leading zeros, or digits around an ``e``
(numbers are printed as ``1e+20``, ``1e-05`` or ``1.0E10``)."""
_EXACT = Context(prec=40, Emax=MAX_EMAX, Emin=MIN_EMIN)
"""Forty digits of a difference are far more than any tolerance needs."""
_TOLERANT = re.compile(r"(float|absolute|relative):([0-9]+(?:\.[0-9]+)?(?:e-[0-9]{1,2})?)")
_LARGEST_TOLERANCE = Decimal("0.1")
_FUSION_RELATIVE, _FUSION_SMALLEST = 1e-5, 1e-10
_SHOWN = 200
_REMEMBERED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRule:
    """A rule: how outputs are compared, as sequences of units that must be equal one by one, and
    how far a float in a function's result may differ from the expected one.
    """

    name: str
    """Name of the rule in a row."""
    unit: Literal["line", "word"]
    units: Callable[[str], list[str]]
    equal: Callable[[str, str], bool]
    """Whether the first unit is accepted for the expected second one, if they differ as text."""
    result_tolerance: tuple[float, float] = (0.0, 0.0)
    """Tolerances of floats in results: absolute, and relative to the expected value; the larger
    applies."""


def output_difference(
    got: str, want: str, rule: ComparisonRule, *, ignore_case: bool = False
) -> str | None:
    """The difference between the output ``got`` and ``want``, or None if ``rule`` accepts it. With
    ``ignore_case`` case does not count.
    """
    if ignore_case:
        got, want = got.lower(), want.lower()
    given, expected = rule.units(got), rule.units(want)
    if given == expected:
        return None
    if len(given) != len(expected):
        return f"{len(given)} {rule.unit}s of output, expected {len(expected)}"
    return _first_difference(given, expected, rule)


def output_prefix_difference(got: str, want: str, rule: ComparisonRule) -> str | None:
    """The difference between ``want`` and every output that begins with ``got``, or None if one of
    them may be accepted. The last unit may continue unless a separator follows it.
    """
    end = max(map(got.rfind, "\n" if rule.unit == "line" else f"{_SPACE}\n"))
    given, expected = rule.units(got[: end + 1]), rule.units(want)
    both = min(len(given), len(expected))
    if reason := _first_difference(given[:both], expected[:both], rule):
        return reason
    return f"more {rule.unit}s of output, expected {both}" if len(given) > both else None


def _first_difference(got: Sequence[str], want: Sequence[str], rule: ComparisonRule) -> str | None:
    for number, (left, right) in enumerate(zip(got, want, strict=True), 1):
        if left != right and not rule.equal(left, right):
            got_text, want_text = left[:_SHOWN], right[:_SHOWN]
            return f"{rule.unit} {number} differs: {got_text!r}, expected {want_text!r}"
    return None


def rule_named(name: Any) -> ComparisonRule:
    """The rule of that name in a row. Raises ``ValueError`` that lists all rules."""
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
    def equal_lines(got: str, want: str) -> bool:
        left, right = _words(got), _words(want)
        return len(left) == len(right) and all(map(equal, left, right))

    return equal_lines


def _same_value(got: str, want: str) -> bool:
    numbers = _DECIMAL.fullmatch(got) and _DECIMAL.fullmatch(want)
    return numbers is not None and Decimal(got) == Decimal(want)


def _within(absolute: Decimal, relative: Decimal) -> Callable[[str, str], bool]:
    """A comparison of two words: equal text, or numbers that differ by at most the larger
    tolerance. Two integers must be equal.
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
def _tolerant(name: str, kind: str, tolerance: Decimal) -> ComparisonRule:
    absolute = tolerance if kind != "relative" else Decimal(0)
    relative = tolerance if kind != "absolute" else Decimal(0)
    return ComparisonRule(
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
STRICT = ComparisonRule(name="strict", unit="line", units=_lines_as_written, equal=operator.eq)
"""The rule of rows that name none."""
TOKENS = ComparisonRule(name="tokens", unit="word", units=_words, equal=operator.eq)
LIVE_CODE_BENCH = ComparisonRule(
    name="livecodebench",
    unit="line",
    units=_stripped_lines,
    equal=_all_words(_same_value),
    # LeetCode, the source of its functions, accepts answers within 1e-5.
    result_tolerance=(1e-5, 0.0),
)
CODE_CONTESTS = ComparisonRule(
    name="code_contests", unit="word", units=_words, equal=_contests_words
)
APPS = ComparisonRule(
    name="apps", unit="line", units=_lines_with_words, equal=_all_words(_contests_words)
)
SANDBOX_FUSION = ComparisonRule(
    name="sandbox_fusion", unit="line", units=_fusion_lines, equal=_fusion_close
)
"""SandboxFusion's own rule with its gaps, for comparisons of services."""
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
"""Python text for the judge that compares a function's result with the expected one. Tuples equal
lists, and floats may differ by the larger of two tolerances. ``first`` also accepts the first item
of an expected list."""
_RESERVED = "abs all dict float int isinstance len list max tuple type zip matches same"
RESULT_CHECK_NAMES = frozenset([*(f"_{name}" for name in _RESERVED.split()), "inf", "nan"])
"""Names that ``RESULT_CHECK`` defines; a problem's function may have none of them."""
