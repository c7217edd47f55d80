"""Reads text with integers of many digits, which some contest problems have.

Python refuses more than 4,300 digits, because the time to read them grows with the square of their
number and blocks a service. The bounds here are larger, on each integer and on all of a text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INTEGER_DIGITS = 100_000
"""Most decimal digits of one integer in a record, a test or an answer; reading so many takes 0.1 s.
Integers inside a program may have any length."""
LONG_DIGITS = 2_000_000
"""Most decimal digits of all integers above 4,300 digits in one text that a service reads."""
_LONG = 4300
"""Digits up to which Python itself reads an integer; the time for these is negligible."""
_RUN = re.compile(r"[0-9]*+")
_TOO_LONG = (
    f"an integer has more than {INTEGER_DIGITS} digits, or all long ones together have more than "
    f"{LONG_DIGITS}"
)


@contextmanager
def allow_long_integers() -> Iterator[None]:
    """Within the block Python reads and writes integers of up to ``INTEGER_DIGITS`` digits."""
    before = sys.get_int_max_str_digits()
    if 0 < before < INTEGER_DIGITS:
        sys.set_int_max_str_digits(INTEGER_DIGITS)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


def load_long_integer_json(text: str | bytes) -> Any:
    """``json.loads`` for text with long integers. Raises ``json.JSONDecodeError``, also above the
    bounds.
    """
    text = text if isinstance(text, str) else text.decode(json.detect_encoding(text))
    if not count_long_run_digits(text):
        return json.loads(text)
    left = LONG_DIGITS

    def integer(digits: str) -> int:
        nonlocal left
        left -= len(digits) if len(digits) > _LONG else 0
        if left < 0 or len(digits) > INTEGER_DIGITS:
            raise json.JSONDecodeError(_TOO_LONG, text, 0)
        return int(digits)

    with allow_long_integers():
        return json.loads(text, parse_int=integer)


def require_few_digits(text: str, where: str) -> None:
    """Raise ``ValueError`` for Python text whose long integers take too much time to parse."""
    if count_long_run_digits(text) > LONG_DIGITS:
        raise ValueError(f"{where}: its long numbers have more than {LONG_DIGITS} digits together")


def count_long_run_digits(text: str) -> int:
    """Digits in all runs of more than 4,300 digits. Reads only every 4,300th character outside
    runs.
    """
    total, at = 0, 0
    while at < len(text):
        run = _RUN.match(text, at)
        end = run.end() if run else at
        if end > at:
            before = text[max(at - _LONG, 0) : at]
            begin = at - len(before) + len(before.rstrip("0123456789"))
            total += end - begin if end - begin > _LONG else 0
        at = (end // _LONG + 1) * _LONG
    return total
