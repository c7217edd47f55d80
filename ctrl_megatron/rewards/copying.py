"""The share of a revision's program that its critique contains already: a critic that writes the
program itself is rewarded for the program and not for the critique.
"""

from __future__ import annotations

import ast
import contextlib
import html
import re
from collections import Counter
from collections.abc import Iterator

from ctrl_megatron.prompts.python_source import parsed

COPYING_THRESHOLD = 0.5
"""Default of the share of a revision's program that a critique may contain."""
_WORD = re.compile(r"\w+|[^\w\s]")
_NO_WORD = frozenset("()\"'`,;\\")
"""Characters that do not count, because one line can be written with them or without them."""
_HTML_TAG = re.compile(r"</?[A-Za-z][^<>\n]*>")
_SHORTEST = 3
"""Least number of words and signs of a line that a text contains by more than chance."""


def copied_rate(critique: str, program: str) -> float:
    """Share of the lines of ``program`` that ``critique`` contains, in [0, 1]; 0 for a program
    without lines.

    Comments, docstrings, layout, quotes and brackets do not count, nor do lines such as ``else:``
    where the program has longer ones. A line is found in a sentence, a list or a block of any kind,
    in HTML, and between other lines in one line of text.
    """
    lines = list(_lines(program))
    counted = Counter(map(_joined, [line for line in lines if len(line) >= _SHORTEST] or lines))
    if not counted:
        return 0.0
    plain = html.unescape(critique)
    texts = [_joined(_words(text)) for text in (critique, plain, _HTML_TAG.sub(" ", plain))]
    found = (n for line, n in counted.items() if any(line in text for text in texts))
    return sum(found) / counted.total()


def _joined(words: list[str]) -> str:
    return f" {' '.join(words)} "


def _words(text: str) -> list[str]:
    return [word for word in _WORD.findall(text) if word not in _NO_WORD]


def _lines(code: str) -> Iterator[list[str]]:
    tree = parsed(code)
    if tree is not None:
        # Numbers too long to print and extreme nesting: the lines stay as they are written.
        with contextlib.suppress(ValueError, RecursionError, MemoryError):
            code = ast.unparse(_without_docstrings(tree))
    for line in code.splitlines():
        if words := _words(line):
            yield words


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return tree
