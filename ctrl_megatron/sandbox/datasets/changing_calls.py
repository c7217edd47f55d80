"""Finds the calls of a test that are made for what they do to their arguments.

A program must not change the values that its answer is compared with: for a program that empties
the list and returns it, ``assert f(xs) == sorted(xs)`` would be true. A change of an argument
therefore reaches the test only in two cases: the test discards the result or compares it with None,
or the test does nothing with the argument afterwards but assert that it equals a literal.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ctrl_megatron.sandbox.datasets.syntax import arguments_of


def changing_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls whose changes to their arguments the test must see."""
    ignored = set(_ignored(tree))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _passes_a_name(node)]
    uses = None
    for call in calls:
        if call in ignored:
            yield call
            continue
        uses = uses if uses is not None else _uses(tree)
        names = {node.id for node in arguments_of(call) if isinstance(node, ast.Name)}
        places = [use for name in names for use in uses.get(name, ())]
        later = [compared for place, compared in places if place > _place(call)]
        if later and all(later):
            yield call


def _passes_a_name(call: ast.Call) -> bool:
    return any(not isinstance(node, ast.Constant) for node in arguments_of(call))


def _ignored(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls whose result the test discards or compares with None."""
    for node in ast.walk(tree):
        call: ast.AST | None = node.value if isinstance(node, ast.Expr) else None
        if isinstance(node, ast.Compare) and any(
            isinstance(c, ast.Constant) and c.value is None for c in node.comparators
        ):
            call = node.left
        if isinstance(call, ast.Call):
            yield call


def _uses(tree: ast.AST) -> dict[str, list[tuple[tuple[int, int], bool]]]:
    """The places that read each name, and whether a place only compares it with a literal."""
    compared: set[ast.Name] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            for part in _conjuncts(node.test):
                if isinstance(part, ast.Compare) and all(map(_is_literal, part.comparators)):
                    compared.update(n for n in ast.walk(part.left) if isinstance(n, ast.Name))
    found: dict[str, list[tuple[tuple[int, int], bool]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.setdefault(node.id, []).append((_place(node), node in compared))
    return found


def _conjuncts(test: ast.expr) -> Iterable[ast.expr]:
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else (test,)


def _is_literal(node: ast.expr) -> bool:
    return not any(isinstance(part, (ast.Name, ast.Call, ast.Attribute)) for part in ast.walk(node))


def _place(node: ast.expr) -> tuple[int, int]:
    return (node.end_lineno or 0, node.end_col_offset or 0)
