"""Which calls of a test are made for what they do to their arguments.

A program must not change what its answer is compared with: ``assert f(xs) == sorted(xs)`` would
hold for one that empties the list and returns it. So what a call does to its arguments reaches the
test only where the result is thrown away or compared with None, and where all that the test says of
an argument afterwards is that it equals a literal.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ctrl_megatron.sandbox.jail.evidence import NAME


def changing_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls after which the test's arguments are what the program has made of them."""
    ignored = set(_ignored(tree))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _passes_a_name(node)]
    uses = None
    for call in calls:
        if call in ignored:
            yield call
            continue
        uses = uses if uses is not None else _uses(tree)
        names = {node.id for node in _arguments(call) if isinstance(node, ast.Name)}
        places = [use for name in names for use in uses.get(name, ())]
        later = [compared for place, compared in places if place > _place(call)]
        if later and all(later):
            yield call


def _passes_a_name(call: ast.Call) -> bool:
    return any(not isinstance(node, ast.Constant) for node in _arguments(call))


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _ignored(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls whose result is thrown away or compared with None."""
    for node in ast.walk(tree):
        call: ast.AST | None = node.value if isinstance(node, ast.Expr) else None
        if isinstance(node, ast.Compare) and any(
            isinstance(c, ast.Constant) and c.value is None for c in node.comparators
        ):
            call = _unmarked(node.left)
        if isinstance(call, ast.Call):
            yield call


def _uses(tree: ast.AST) -> dict[str, list[tuple[tuple[int, int], bool]]]:
    """Where each name is read, and whether it is only compared with a literal there."""
    compared: set[ast.Name] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            for part in map(_unmarked, _conjuncts(_unmarked(node.test))):
                if isinstance(part, ast.Compare) and all(map(_is_literal, part.comparators)):
                    compared.update(n for n in ast.walk(part.left) if isinstance(n, ast.Name))
    found: dict[str, list[tuple[tuple[int, int], bool]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.setdefault(node.id, []).append((_place(node), node in compared))
    return found


def _unmarked(node: ast.expr) -> ast.expr:
    """What is checked, where the check says so."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        if not isinstance(owner, ast.Name) or owner.id != NAME:
            break
        node = node.args[-1]
    return node


def _conjuncts(test: ast.expr) -> Iterable[ast.expr]:
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else (test,)


def _is_literal(node: ast.expr) -> bool:
    return not any(isinstance(part, (ast.Name, ast.Call, ast.Attribute)) for part in ast.walk(node))


def _place(node: ast.expr) -> tuple[int, int]:
    return (node.end_lineno or 0, node.end_col_offset or 0)
