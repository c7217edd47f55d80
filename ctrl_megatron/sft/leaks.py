"""What a critique must not give away: the hint, the tests, what they expect, the solution."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

from ctrl_megatron.prompts import extract_code
from ctrl_megatron.types import Attempt

_HINT = re.compile(r"\bhints?\b|\btest (?:case|suite)s?\b|\b(?:unit|hidden|failing) tests?\b", re.I)
_CODE = re.compile(r"```|^\s*(?:def|class) \w+.*:\s*$", re.MULTILINE)
_SHORTEST = 4
"""Characters of a value that cannot stand in a critique by chance."""
_SHORTEST_LINE = 12
"""Characters of a line of the reference that is more than ``return n``."""


def leak_of(critique: str, attempt: Attempt) -> str:
    """What ``critique`` gives away, for the table of what was dropped; empty for nothing.

    A value or a line that the statement or the attempt holds already is no leak.
    """
    if _HINT.search(critique):
        return "speaks of the hint or of tests"
    if _CODE.search(critique):
        return "writes out code"
    problem, squeezed = attempt.problem, _squeezed(critique)
    known = _squeezed(f"{problem.statement}\n{extract_code(attempt.solution)}")
    if any(_squeezed(test) in squeezed for test in _tests(attempt)):
        return "quotes a test"
    for value in _expected(attempt):
        word = _squeezed(value)
        if len(word) >= _SHORTEST and word not in known and word in squeezed:
            return "quotes an expected value"
    lines = {_squeezed(line) for line in problem.reference.splitlines()}
    if any(len(s) >= _SHORTEST_LINE and s not in known and s in squeezed for s in lines):
        return "quotes the solution"
    return ""


def _tests(attempt: Attempt) -> Iterator[str]:
    tests = attempt.problem.selected_uts
    if isinstance(tests, str):
        for case in json.loads(tests):
            stdin = case["input"].get("stdin", "").strip()
            if len(stdin) >= _SHORTEST_LINE:
                yield stdin
        return
    for test in tests:
        yield test.removeprefix("assert ")


def _expected(attempt: Attempt) -> Iterator[str]:
    """Literals that a test compares with, outputs of programs."""
    tests = attempt.problem.selected_uts
    if isinstance(tests, str):
        yield from (case["output"]["stdout"].strip() for case in json.loads(tests))
        return
    for test in tests:
        try:
            tree = ast.parse(test)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # the sandbox says so; there is no value to quote
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                for side in node.comparators:
                    if not isinstance(side, ast.Name | ast.Call):
                        yield ast.unparse(side)


def _squeezed(text: str) -> str:
    return re.sub(r"[\s`'\"]+", "", text)
