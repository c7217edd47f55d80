"""How much of a revision is in the critique before it: a critic that writes the program itself is
paid for the program, not for the critique.
"""

from __future__ import annotations

import ast
import contextlib
import html
import re
from collections import Counter
from collections.abc import Iterator

from ctrl_megatron.prompts import extract_code
from ctrl_megatron.prompts.python_source import parsed

COPYING_THRESHOLD = 0.5
"""Share of a revision's program that a critique may hold, by default."""
_WORD = re.compile(r"\w+|[^\w\s]")
_NO_WORD = frozenset("()\"'`,;\\")
"""Signs in which the same line is written in several ways."""
_HTML_TAG = re.compile(r"</?[A-Za-z][^<>\n]*>")
_SHORTEST = 3
"""Words and signs of a line that is in a text by more than chance."""


def copied_rate(critique: str, revision: str) -> float:
    """Share of the lines of the revision's program that are in ``critique``, in [0, 1].

    Comments, docstrings, layout, quotes and brackets do not count, nor do lines such as ``else:``
    where there are longer ones. A line is found in a sentence, a list or a block of any kind, in
    HTML, and among others on one line. 0 for a revision without a program.
    """
    lines = list(_lines(extract_code(revision)))
    counted = Counter(map(_joined, [line for line in lines if len(line) >= _SHORTEST] or lines))
    if not counted:
        return 0.0
    plain = html.unescape(critique)
    said = [_joined(_words(text)) for text in (critique, plain, _HTML_TAG.sub(" ", plain))]
    found = (n for line, n in counted.items() if any(line in text for text in said))
    return sum(found) / counted.total()


def _joined(words: list[str]) -> str:
    return f" {' '.join(words)} "


def _words(text: str) -> list[str]:
    return [word for word in _WORD.findall(text) if word not in _NO_WORD]


def _lines(code: str) -> Iterator[list[str]]:
    tree = parsed(code)
    if tree is not None:
        # Of numbers too long to print and of absurd nesting the lines as they are written.
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
