"""Does a program's output answer a stdin/stdout problem? SandboxFusion's CommonOJ rule, outside the
program.

Both texts are stripped and split into lines; one trailing empty line is tolerated; lines are
compared stripped and in lower case; lines that differ must both be a number as a whole, with a
relative error below 1e-5.
"""

from __future__ import annotations

import math

_RELATIVE = 1e-5
_SMALLEST = 1e-10


def difference(got: str, want: str) -> str | None:
    """What distinguishes ``got`` from ``want``, or None when it is accepted."""
    got_lines, want_lines = _lines(got), _lines(want)
    if len(got_lines) != len(want_lines):
        return f"{len(got_lines)} lines of output, expected {len(want_lines)}"
    for number, (left, right) in enumerate(zip(got_lines, want_lines, strict=True), 1):
        if left != right and not _close(left, right):
            return f"line {number} differs: {left[:200]!r}, expected {right[:200]!r}"
    return None


def _lines(text: str) -> list[str]:
    lines = [line.strip().lower() for line in text.strip().split("\n")]
    return lines[:-1] if len(lines) > 1 and not lines[-1] else lines


def _close(got: str, want: str) -> bool:
    try:
        left, right = float(got), float(want)
    except ValueError:
        return False
    if not (math.isfinite(left) and math.isfinite(right)):
        return left == right
    return abs(left - right) / max(abs(right), _SMALLEST) < _RELATIVE
