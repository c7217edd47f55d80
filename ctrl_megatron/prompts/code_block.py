"""Fenced code in and out of text, with the exact semantics of CTRL's ``sanitize`` and
``desanitize``.
"""

from __future__ import annotations

FENCE = "```"
_TAG = "python"


def sanitize(text: str) -> str:
    """Reduce ``text`` to its first fenced block, written canonically.

    The ``python`` tag is optional and matches in any case; the end of the text closes an open
    block. Without a block, or when the first block holds only white space, ``text`` itself is
    returned.
    """
    code = _first_block(text, must_close=False)
    return fenced(code) if code else text


def desanitize(text: str) -> str:
    """The stripped content of the first *closed* fenced block; ``text`` itself without one."""
    code = _first_block(text, must_close=True)
    return text if code is None else code


def extract_code(text: str) -> str:
    """The program an answer hands in: its first fenced block, open or closed, else all of it."""
    return desanitize(sanitize(text))


def fenced(code: str) -> str:
    """``code`` as the canonical fenced block."""
    return f"{FENCE}{_TAG}\n{code}\n{FENCE}"


def _first_block(text: str, *, must_close: bool) -> str | None:
    # Searched by hand: the equivalent regular expression is quadratic in runs of white space, and
    # these texts come from a model.
    opening = text.find(FENCE)
    if opening < 0:
        return None
    start = opening + len(FENCE)
    if text[start : start + len(_TAG)].lower() == _TAG:
        start += len(_TAG)
    end = text.find(FENCE, start)
    if end < 0 and must_close:
        return None
    return (text[start:] if end < 0 else text[start:end]).strip()
