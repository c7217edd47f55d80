"""Finds leaks in critiques: mentions of the hint, tests, expected values, or the solution."""

from __future__ import annotations

import ast
import html
import re
import textwrap
from collections.abc import Iterator
from itertools import groupby

from ctrl_megatron.problems.long_integers import load_long_integer_json
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
"""Fewest characters of a value that counts as quoted: shorter ones occur by chance."""
_LITERAL = (
    ast.Constant | ast.List | ast.Tuple | ast.Set | ast.Dict | ast.UnaryOp | ast.BinOp  # -1, 2 ** 9
)
_SHORTEST_LINE = 12
"""Fewest characters of a line that counts as quoted: shorter ones (``return n``) occur by chance.
"""


def find_leak(critique: str, attempt: Attempt) -> str:
    """The leak in ``critique``, as a reason to drop it; empty if there is none.

    A value or line that the statement or the attempt contains is not a leak.
    """
    if _HINT.search(critique):
        return "mentions the hint or tests"
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
    """Whether ``critique`` contains a function, a class or a block of code: fenced, in HTML, or two
    or more indented lines that parse as a program.
    """
    text = html.unescape(critique)
    if _CODE.search(text):
        return True
    blocks = groupby(text.splitlines(), key=lambda line: _MARGIN.match(line) is not None)
    written = (list(lines) for is_indented, lines in blocks if is_indented)
    return any(len(w) > 1 and is_program(textwrap.dedent("\n".join(w))) for w in written)


def _tests(attempt: Attempt) -> Iterator[str]:
    """Whole tests: asserts, and inputs that are long enough."""
    tests = attempt.problem.selected_uts
    if isinstance(tests, str):
        for case in load_long_integer_json(tests):
            stdin = case["input"].get("stdin", "").strip()
            if len(stdin) >= _SHORTEST_LINE:
                yield stdin
        return
    for test in tests:
        yield test.removeprefix("assert ")


def _values(attempt: Attempt) -> Iterator[str]:
    """Inputs and expected values of the tests: all literals in asserts and their parts; lines of
    stdin and stdout, and stdout as a whole.
    """
    tests = attempt.problem.selected_uts
    if isinstance(tests, str):
        for case in load_long_integer_json(tests):
            stdout = case["output"]["stdout"]
            yield stdout
            yield from case["input"].get("stdin", "").splitlines()
            yield from stdout.splitlines()
        return
    for test in tests:
        try:
            tree = ast.parse(test)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # the sandbox reports it; such a test has no values
        for node in ast.walk(tree):
            if isinstance(node, _LITERAL):
                yield ast.unparse(node)


def _stands_alone(word: str, critique: str) -> bool:
    """Whether ``critique`` contains ``word`` other than within a longer word or number. White space
    and quotes inside it are ignored.
    """
    inner = r"[\s`'\"]*".join(map(re.escape, word))
    return re.search(rf"(?<!\w){inner}(?!\w)", critique) is not None


def _squeezed(text: str) -> str:
    return re.sub(r"[\s`'\"]+", "", text)
