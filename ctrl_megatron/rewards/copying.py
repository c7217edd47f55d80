"""The share of a revision's program that its critique contains already: a critic that writes the
program itself is rewarded for the program and not for the critique.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import html
import keyword
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate

from ctrl_megatron.prompts.python_source import parse_python

Line = tuple[str, ...]
"""The words and signs of a line."""
COPYING_THRESHOLD = 0.5
"""Default of the share of a revision's program that a critique may contain."""
_WORD = re.compile(r"\d+(?:\.\d+)?|\w+|[^\w\s]")
_NO_WORD = frozenset("()\"'`,;\\")
"""Characters that do not count, because one line can be written with them or without them."""
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
_HTML_TAG = re.compile(r"</?[A-Za-z][^<>\n]*>")
_SHORTEST = 3
"""Least number of words and signs of a line that a text contains by more than chance."""
_SHORTEST_RENAMED = 12
"""The same of all lines together that it contains under other names."""
_PLACES = 64
"""Places in a text at which a renamed line is looked for."""
_KEPT = {word.casefold() for word in (*keyword.kwlist, *dir(builtins))}
"""Words that no copy can write in another way."""
_NUMBER, _NAME = "0", "x"


def copied_line_share(critique: str, program: str) -> float:
    """Share of the lines of ``program`` that ``critique`` contains, in [0, 1]; 0 for a program
    without lines.

    Comments, docstrings, layout, case, quotes and brackets do not count, nor do lines such as
    ``else:`` where the program has longer ones. A line is found in a sentence, a list or a block of
    any kind, in HTML, and between other lines in one line of text. Lines with other numbers, or
    with other names, each for one of the program's, count where they are long enough together not
    to be there by chance.
    """
    lines = list(_lines(program))
    counted = Counter(map(tuple, [line for line in lines if len(line) >= _SHORTEST] or lines))
    if not counted:
        return 0.0
    plain = html.unescape(critique)
    texts = [_words(text) for text in (critique, plain, _HTML_TAG.sub(" ", plain))]
    most = max(max(_found(counted, text), _found_renamed(counted, text)) for text in texts)
    return most / counted.total()


def _found(lines: Counter[Line], text: list[str]) -> int:
    """How many of the lines ``text`` contains as they are."""
    whole = _joined(text)
    return sum(count for line, count in lines.items() if _joined(line) in whole)


def _found_renamed(lines: Counter[Line], text: list[str]) -> int:
    """How many of the lines ``text`` contains with other numbers and names, where each name has one
    other name; 0 where they are so short that they may be there by chance.
    """
    shapes = [_shape(word) for word in text]
    whole = _joined(shapes)
    # The word that begins at each character of ``whole``.
    begins = {at: i for i, at in enumerate(accumulate((len(s) + 1 for s in shapes), initial=0))}
    names, back = dict[str, str](), dict[str, str]()
    count = words = 0
    for line, times in sorted(lines.items(), key=lambda item: -len(item[0])):
        shape, at = _joined(map(_shape, line)), -1
        for _ in range(_PLACES):
            if (at := whole.find(shape, at + 1)) < 0:
                break
            there = text[begins[at] : begins[at] + len(line)]
            pairs = {(a, b) for a, b in zip(line, there, strict=True) if _shape(a) == _NAME}
            if len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}) and all(
                names.get(a, b) == b and back.get(b, a) == a for a, b in pairs
            ):
                names.update(pairs)
                back.update((b, a) for a, b in pairs)
                count, words = count + times, words + times * len(line)
                break
    return count if words >= _SHORTEST_RENAMED else 0


def _shape(word: str) -> str:
    """A word without what a copy may change: its number or its name."""
    if word[0].isdigit():
        return _NUMBER
    named = word.isidentifier() and word not in _KEPT
    return _NAME if named else word


def _joined(words: Iterable[str]) -> str:
    return f" {' '.join(words)} "


def _words(text: str) -> list[str]:
    plain = unicodedata.normalize("NFKC", text).casefold()
    return [word for word in _WORD.findall(_INVISIBLE.sub("", plain)) if word not in _NO_WORD]


def _lines(code: str) -> Iterator[list[str]]:
    tree = parse_python(code)
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
