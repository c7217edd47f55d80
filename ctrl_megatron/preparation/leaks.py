"""What a critique must not give away: the hint, the tests, what they expect, the solution."""

from __future__ import annotations

import ast
import html
import json
import re
import textwrap
from collections.abc import Iterator
from itertools import groupby

from ctrl_megatron.prompts import extract_code
from ctrl_megatron.prompts.python_source import is_program
from ctrl_megatron.types import Attempt

_HINT = re.compile(r"\bhints?\b|\btest (?:case|suite)s?\b|\b(?:unit|hidden|failing) tests?\b", re.I)
_ARGUMENT = r"\*{0,2}\w+(?:\s*=\s*[^\s,:]+)?"
_CODE = re.compile(
    r"```|~~~|</?pre\b"  # blocks
    r"|\b(?:async\s+)?def\s+\w+\s*\([^\n]{0,200}\)[^\n:]{0,99}:"  # anywhere in a line
    r"|^[^\w\n]*+\d*+[^\w\n]*+class\s+\w+\s*(?:\([^\n]{0,200}\))?\s*:"
    rf"|\blambda\s*(?:{_ARGUMENT}(?:\s*,\s*{_ARGUMENT})*)?\s*:"
    r"|^[^\w\n@]*+\d*+[^\w\n@]*+@\w[\w.]*\s*(?:\(.*\))?$",
    re.MULTILINE,
)
_MARGIN = re.compile(r"(?: {4}|\t)\s*\S")
_SHORTEST = 4
"""Characters of a value that cannot stand in a critique by chance."""
_LITERAL = (
    ast.Constant | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.UnaryOp | ast.BinOp  # -1, 2 ** 9
)
_SHORTEST_LINE = 12
"""Characters of a line of the reference that is more than ``return n``."""


def leak_of(critique: str, attempt: Attempt) -> str:
    """What ``critique`` gives away, for the table of what was dropped; empty for nothing.

    A value or a line that the statement or the attempt holds already is no leak.
    """
    if _HINT.search(critique):
        return "speaks of the hint or of tests"
    if _writes_code(critique):
        return "writes out code"
    problem, squeezed = attempt.problem, _squeezed(critique)
    known = _squeezed(f"{problem.statement}\n{extract_code(attempt.solution)}")
    if any(_squeezed(test) in squeezed for test in _tests(attempt)):
        return "quotes a test"
    for value in _values(attempt):
        word = _squeezed(value)
        told = len(word) >= _SHORTEST and word not in known and word in squeezed
        if told and _stands_alone(word, critique):
            return "quotes a value of a test"
    lines = {_squeezed(line) for line in problem.reference.splitlines()}
    if any(len(s) >= _SHORTEST_LINE and s not in known and s in squeezed for s in lines):
        return "quotes the solution"
    return ""


def _writes_code(critique: str) -> bool:
    """Whether ``critique`` holds a function, a class or a block of code: fenced, in HTML, or at
    least two indented lines that are a program.
    """
    text = html.unescape(critique)
    if _CODE.search(text):
        return True
    blocks = groupby(text.splitlines(), key=lambda line: _MARGIN.match(line) is not None)
    written = (list(lines) for is_indented, lines in blocks if is_indented)
    return any(len(w) > 1 and is_program(textwrap.dedent("\n".join(w))) for w in written)


def _tests(attempt: Attempt) -> Iterator[str]:
    """Whole ones; an input that is long enough is one."""
    tests = attempt.problem.selected_uts
    if isinstance(tests, str):
        for case in json.loads(tests):
            stdin = case["input"].get("stdin", "").strip()
            if len(stdin) >= _SHORTEST_LINE:
                yield stdin
        return
    for test in tests:
        yield test.removeprefix("assert ")


def _values(attempt: Attempt) -> Iterator[str]:
    """What tests give a program and what they want of it: literals at any place in an assert,
    and parts of them; lines of stdin and stdout, and stdout as a whole.
    """
    tests = attempt.problem.selected_uts
    if isinstance(tests, str):
        for case in json.loads(tests):
            stdout = case["output"]["stdout"]
            yield stdout
            yield from case["input"].get("stdin", "").splitlines()
            yield from stdout.splitlines()
        return
    for test in tests:
        try:
            tree = ast.parse(test)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # the sandbox says so; there is no value to quote
        for node in ast.walk(tree):
            if isinstance(node, _LITERAL):
                yield ast.unparse(node)


def _stands_alone(word: str, critique: str) -> bool:
    """Whether ``word`` is no part of a longer word or number; white space and quotes do not count
    within it.
    """
    inner = r"[\s`'\"]*".join(map(re.escape, word))
    return re.search(rf"(?<!\w){inner}(?!\w)", critique) is not None


def _squeezed(text: str) -> str:
    return re.sub(r"[\s`'\"]+", "", text)
