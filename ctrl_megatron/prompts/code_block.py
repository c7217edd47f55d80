"""Fenced code in and out of text: CTRL's ``sanitize`` and ``desanitize``; built on them
``sanitized_answer``, an answer as prompts show it, and ``extract_code``, the one way from a raw
answer to its program.
"""

from __future__ import annotations

import textwrap
from typing import NamedTuple

FENCE = "```"
_TAG = "python"
_PYTHON_TAGS = ("", _TAG, "python3", "py", "py3")
_TAGS = {"cpp": ("cpp", "c++", "cc", "cxx"), "bash": ("bash", "sh", "shell")}
"""Tags of a language's blocks, where there are others than its name."""


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


def sanitized_answer(text: str) -> str:
    """``sanitize`` where the program would still run after it: another name of Python behind the
    fence is a tag, not the program's first line, and a program that is indented as a whole, as in
    a list, loses that.
    """
    tag, line_break, rest = text.partition(FENCE)[2].partition("\n")
    if not line_break or tag.strip().lower() not in _PYTHON_TAGS:
        return sanitize(text)
    code = rest.partition(FENCE)[0]
    if code.lstrip("\r\n")[:1].isspace():
        code = textwrap.dedent(code)
    return fenced(code.strip()) if code.strip() else text


def extract_code(text: str, language: str = "python") -> str:
    """The program an answer hands in.

    Python: its first fenced block, open or closed, else all of it (CTRL's rule, and
    ``sanitized_answer``). Another language: its first block with that language's tag, else its
    first block, else all of it; an open block counts where no block is closed.
    """
    if language == _TAG:
        return desanitize(sanitized_answer(text))
    blocks = fenced_blocks(text)
    tags = _TAGS.get(language, (language,))
    block = next((block for block in blocks if block.tag.lower() in tags), None)
    if block is None and not blocks:
        return text
    return (block or blocks[0]).code.removesuffix("\n")


def fenced(code: str, language: str = _TAG) -> str:
    """``code`` as the canonical fenced block."""
    return f"{FENCE}{language}\n{code}\n{FENCE}"


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


class FencedBlock(NamedTuple):
    """What stands between two fences on lines of their own."""

    tag: str
    """Behind the opening fence: the language, as written."""
    code: str
    """Its lines with their line breaks."""
    closed: bool


def fenced_blocks(text: str) -> list[FencedBlock]:
    """Every closed block of ``text``; where there is none, the one that is never closed. Linear in
    the length of the text.
    """
    blocks: list[FencedBlock] = []
    tag, lines = None, list[str]()
    for line in text.replace("\r\n", "\n").split("\n"):
        mark = line.strip()
        if tag is None and mark.startswith(FENCE) and "`" not in mark[len(FENCE) :]:
            tag, lines = (mark[len(FENCE) :].split() or [""])[0], []
        elif tag is not None and mark == FENCE:
            blocks.append(FencedBlock(tag, "".join(f"{line}\n" for line in lines), True))
            tag = None
        elif tag is not None:
            lines.append(line)
    if tag is not None and not blocks:
        blocks.append(FencedBlock(tag, "\n".join(lines), False))
    return blocks
