"""Questions about Python code that its syntax tree alone answers."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef
_FAILS = frozenset(["abort", "exit", "fail", "quit", "_exit"])


def walk_code(node: ast.AST) -> Iterator[ast.AST]:
    """Like ``ast.walk``, but without constants, of which a test may contain a hundred thousand."""
    parts = [node]
    while parts:
        part = parts.pop()
        yield part
        parts.extend(p for p in ast.iter_child_nodes(part) if type(p) is not ast.Constant)


def is_main_guard(test: ast.expr) -> bool:
    """Whether an expression is ``__name__ == "__main__"``."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1):
        return False
    sides = [test.left, *test.comparators]
    named = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
    main = any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)
    return named and main and isinstance(test.ops[0], ast.Eq)


def is_fixed(node: ast.AST) -> bool:
    """Whether an expression is an immutable constant."""
    if isinstance(node, ast.Tuple):
        return all(map(is_fixed, node.elts))
    if isinstance(node, ast.UnaryOp):
        return is_fixed(node.operand)
    if isinstance(node, ast.BinOp):
        return is_fixed(node.left) and is_fixed(node.right)
    return isinstance(node, ast.Constant)


def is_vacuous(test: ast.expr) -> bool:
    """Whether an expression is true for any value of its parts."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, (ast.Tuple, ast.List, ast.Set)):
        return bool(test.elts) and not any(isinstance(item, ast.Starred) for item in test.elts)
    if isinstance(test, ast.Dict):
        return bool(test.keys) and None not in test.keys
    if isinstance(test, ast.BoolOp):
        return (any if isinstance(test.op, ast.Or) else all)(map(is_vacuous, test.values))
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        sides = test.left, test.comparators[0]
        same = isinstance(test.ops[0], (ast.Eq, ast.Is, ast.LtE, ast.GtE))
        if not same or any(isinstance(part, ast.Call) for part in ast.walk(test.left)):
            return False
        return ast.dump(sides[0]) == ast.dump(sides[1])
    return isinstance(test, (ast.Lambda, ast.GeneratorExp))


def own_parts(statement: ast.AST) -> Iterator[ast.AST]:
    """A statement and its parts, without the bodies of functions and classes that it defines."""
    parts = [statement]
    while parts:
        part = parts.pop()
        yield part
        if not isinstance(part, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            parts.extend(ast.iter_child_nodes(part))


def may_fail(statement: ast.AST) -> bool:
    """Whether a statement may make the test fail."""
    for part in own_parts(statement):
        if isinstance(part, ast.Raise):
            return True
        if isinstance(part, ast.Assert) and not is_vacuous(part.test):
            return True
        name = called_name(part)
        if name is not None and (name in _FAILS or name.startswith("assert")):
            return True
    return False


def surely_fails(statement: ast.AST) -> bool:
    """Whether a statement always makes the test fail."""
    if isinstance(statement, ast.Assert):
        return isinstance(statement.test, ast.Constant) and not statement.test.value
    call = statement.value if isinstance(statement, ast.Expr) else statement
    return isinstance(statement, ast.Raise) or called_name(call) in _FAILS


def leaves(statements: Iterable[ast.AST]) -> bool:
    """Whether one of the statements returns, breaks or continues."""
    leaving = (ast.Return, ast.Break, ast.Continue)
    return any(isinstance(part, leaving) for node in statements for part in own_parts(node))


def mentions(statements: Iterable[ast.AST]) -> set[str]:
    """Names, attributes, and texts that may be names, in the statements."""
    found = set[str]()
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, (ast.Name, ast.Attribute)):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def bound_in(statements: Iterable[ast.AST]) -> set[str]:
    """Local names that the statements assign."""
    bound, elsewhere = set[str](), set[str]()
    for statement in statements:
        for node in own_parts(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                elsewhere.update(node.names)
    return bound - elsewhere


def last_name(node: ast.AST) -> str | None:
    """``b`` of ``a.b``, ``a`` of ``a``; None for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def called_name(node: ast.AST) -> str | None:
    """The last name of the function that a call calls; None for other expressions."""
    return last_name(node.func) if isinstance(node, ast.Call) else None


def arguments_of(node: ast.expr) -> list[ast.expr]:
    """The values of a call's arguments; empty for other expressions."""
    if not isinstance(node, ast.Call):
        return []
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def dotted(node: ast.AST) -> str | None:
    """The text of a name ``a`` or of an attribute ``a.b``; None for other expressions."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def base_of(node: ast.AST) -> str | None:
    """``a`` of ``a.b[c].d``; None if the expression does not begin with a name."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
