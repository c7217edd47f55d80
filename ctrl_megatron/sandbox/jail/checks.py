"""Counts the checks that a test executes: a test without one has not passed.

A check is an ``assert``, an assertion method of unittest or a mock, ``pytest.raises`` and the like,
or a branch of a text that may fail, once the test has asked the program.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

NAME, BRANCH = "_checked", "_branched"
"""Names in the tests' namespace: of ``count_check``, and of a function to call in each branch of an
``if`` or ``match``."""
_FAILS = frozenset(["abort", "exit", "fail", "quit", "_exit"])
_executed = 0


def count_check() -> None:
    global _executed
    _executed += 1


def checks_executed() -> int:
    return _executed


def compile_counting_checks(source: str, name: str) -> CodeType:
    """Compile a text of tests so that its checks are counted. Raises ``SyntaxError`` and the other
    errors of ``ast.parse``.
    """
    if source.startswith("assert") and "\n" not in source.strip():
        # By far the most frequent text: one assert.
        return compile(f"{NAME}();{source}", name, "exec", dont_inherit=True)
    tree = ast.parse(source)
    if any(map(_may_fail, ast.walk(tree))):
        _Counted().visit(tree)
        ast.fix_missing_locations(tree)
    return compile(tree, name, "exec", dont_inherit=True)


class _Counted(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        self.generic_visit(node)
        return [_call(NAME, node), node]

    def visit_If(self, node: ast.If) -> ast.If:
        self.generic_visit(node)
        for branch in (node.body, node.orelse):
            branch.insert(0, _call(BRANCH, node))
        return node

    def visit_Match(self, node: ast.Match) -> ast.Match:
        self.generic_visit(node)
        for case in node.cases:
            case.body.insert(0, _call(BRANCH, node))
        return node


def _may_fail(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", None)) in _FAILS
    return isinstance(node, (ast.Raise, ast.Assert))


def _call(name: str, near: ast.stmt) -> ast.stmt:
    call = ast.Expr(ast.Call(ast.Name(name, ast.Load()), [], []))
    return ast.copy_location(call, near)


def count_library_checks() -> None:
    """Count the assertion methods of unittest and of mocks, in this process."""
    import unittest  # only where tests use it: it would double the memory to fork
    from unittest import mock

    for kind in (unittest.TestCase, mock.NonCallableMock, mock.AsyncMockMixin):
        for name in dir(kind):
            method = getattr(kind, name)
            if name.startswith("assert") and callable(method):
                setattr(kind, name, count_as_check(method))


def count_as_check(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, counted as a check."""

    @functools.wraps(function)
    def counted(*arguments: Any, **named: Any) -> Any:
        count_check()
        return function(*arguments, **named)

    return counted
