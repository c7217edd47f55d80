"""What counts as equal: what a program wrote and what is expected of it, what a function returned
and what it should. Both are compared outside the program.

Outputs follow SandboxFusion's CommonOJ rule without what lets a wrong output pass: there every
line that reads as a float is compared as one, so ``inf`` equals any number beyond 1e308 and the
first six digits answer for a hundred, and capitals do not count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

_INTEGER = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
"""No number has an exponent of more digits; a hash of hexadecimal digits may look like one."""
_LONGEST_FLOAT = 400
"""Characters; longer ones are compared as text."""
_RELATIVE, _ABSOLUTE = 1e-5, 1e-9
_COMMON_OJ_SMALLEST = 1e-10
_SHOWN = 200

RESULT_CHECK = """
from builtins import dict as _dict, list as _list, tuple as _tuple, type as _type
from math import inf, nan
def _plain(value):
    kind = _type(value)
    if kind is _list or kind is _tuple:
        return [_plain(item) for item in value]
    if kind is _dict:
        return {key: _plain(item) for key, item in value.items()}
    return value
def _check(got, wanted, first):
    got, wanted = _plain(got), _plain(wanted)
    if first and _type(wanted) is _list and wanted and got == wanted[0]:
        return
    assert got == wanted
"""
"""Python text for the judge: a function's result equals the expected one where both are equal with
every tuple taken for a list. ``first`` also accepts the expected list's first item.
"""
RESULT_CHECK_NAMES = ("_check", "_dict", "_list", "_plain", "_tuple", "_type", "inf", "nan")


def difference(got: str, want: str, *, ignore_case: bool = False) -> str | None:
    """What distinguishes the output ``got`` from ``want``, or None when it is accepted.

    Both are stripped and split into lines, one trailing empty line is tolerated, lines are compared
    stripped. In lines that differ the words are compared, between equal white space: an expected
    integer is equal to the same integer in another spelling, unless it has leading zeros itself and
    so is text; an expected word with a point or an exponent that is a finite number is equal to a
    finite number that is off by a relative 1e-5 or an absolute 1e-9; every other word only to
    itself.
    """
    if ignore_case:
        got, want = got.lower(), want.lower()
    return _first_difference(_lines(got), _lines(want), _equal_lines)


def beginning_difference(got: str, want: str) -> str | None:
    """What distinguishes every output that begins with ``got`` from ``want``, or None where one of
    them may be accepted. A last line without its line break may go on.
    """
    lines = [line.strip() for line in got.lstrip().split("\n")[:-1]]
    while lines and not lines[-1]:  # white space at the end counts for nothing
        lines.pop()
    expected = _lines(want)
    both = min(len(lines), len(expected))
    if reason := _first_difference(lines[:both], expected[:both], _equal_lines):
        return reason
    return f"more lines of output, expected {both}" if len(lines) > both else None


def common_oj_difference(got: str, want: str) -> str | None:
    """The same by SandboxFusion's own rule, to compare services with. Never for a reward."""
    return _first_difference(_lines(got.lower()), _lines(want.lower()), _common_oj_close)


def _first_difference(
    got: list[str], want: list[str], equal: Callable[[str, str], bool]
) -> str | None:
    if len(got) != len(want):
        return f"{len(got)} lines of output, expected {len(want)}"
    for number, (left, right) in enumerate(zip(got, want, strict=True), 1):
        if left != right and not equal(left, right):
            return f"line {number} differs: {left[:_SHOWN]!r}, expected {right[:_SHOWN]!r}"
    return None


def _lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.strip().split("\n")]
    return lines[:-1] if len(lines) > 1 and not lines[-1] else lines


def _equal_lines(got: str, want: str) -> bool:
    # Words and the white space between them take turns.
    left, right = re.split(r"(\s+)", got), re.split(r"(\s+)", want)
    return len(left) == len(right) and all(map(_equal_words, left, right))


def _equal_words(got: str, want: str) -> bool:
    if got == want:
        return True
    if _INTEGER.fullmatch(want):
        return (
            want == _integer(want) and _INTEGER.fullmatch(got) is not None and _integer(got) == want
        )
    if max(len(got), len(want)) > _LONGEST_FLOAT or not _FLOAT.fullmatch(want):
        return False
    if not _FLOAT.fullmatch(got):
        return False
    left, right = float(got), float(want)
    if not (math.isfinite(left) and math.isfinite(right)):
        return False
    return abs(left - right) <= max(_RELATIVE * abs(right), _ABSOLUTE)


def _integer(word: str) -> str:
    """An integer without leading zeros and plus sign; not by way of ``int``, which is quadratic."""
    digits = word.lstrip("+-").lstrip("0") or "0"
    return f"-{digits}" if word[0] == "-" and digits != "0" else digits


def _common_oj_close(got: str, want: str) -> bool:
    try:
        left, right = float(got), float(want)
    except ValueError:
        return False
    if not (math.isfinite(left) and math.isfinite(right)):
        return left == right
    return abs(left - right) / max(abs(right), _COMMON_OJ_SMALLEST) < _RELATIVE
