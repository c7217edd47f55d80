"""Reads text that may contain integers with many digits, as problems of contests do.

Python refuses more than 4,300 digits, because the time for reading an integer grows with the square
of its length and the interpreter does nothing else meanwhile. Here each integer, and all of a text
together, are limited as well.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INTEGER_DIGITS = 100_000
"""Of one integer in a record, a test or an answer, in decimal: reading one takes 0.1 s. A program's
own integers may be of any length."""
LONG_DIGITS = 2_000_000
"""Of all integers of more than 4,300 digits in one text that a service reads."""
_LONG = 4300
"""Digits; the time for a shorter integer is negligible."""
_RUN = re.compile(r"[0-9]*+")
_TOO_LONG = (
    f"an integer has more than {INTEGER_DIGITS} digits, or all long ones together have more than "
    f"{LONG_DIGITS}"
)


@contextmanager
def long_integers() -> Iterator[None]:
    """In the block Python reads and writes integers of ``INTEGER_DIGITS`` digits."""
    before = sys.get_int_max_str_digits()
    if 0 < before < INTEGER_DIGITS:
        sys.set_int_max_str_digits(INTEGER_DIGITS)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


def loads(text: str | bytes) -> Any:
    """Like ``json.loads``, for text with long integers. Raises ``json.JSONDecodeError``, also
    beyond the limits.
    """
    text = text if isinstance(text, str) else text.decode(json.detect_encoding(text))
    if not digits_of_long_runs(text):
        return json.loads(text)
    left = LONG_DIGITS

    def integer(digits: str) -> int:
        nonlocal left
        left -= len(digits) if len(digits) > _LONG else 0
        if left < 0 or len(digits) > INTEGER_DIGITS:
            raise json.JSONDecodeError(_TOO_LONG, text, 0)
        return int(digits)

    with long_integers():
        return json.loads(text, parse_int=integer)


def require_few_digits(text: str, where: str) -> None:
    """Raise ``ValueError`` for Python code whose integers take long to parse."""
    if digits_of_long_runs(text) > LONG_DIGITS:
        raise ValueError(f"{where}: its long numbers have more than {LONG_DIGITS} digits together")


def digits_of_long_runs(text: str) -> int:
    """Number of digits in all runs of more than 4,300 digits, found without reading every
    character.
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
