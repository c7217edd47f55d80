"""Tests whether a text is Python and whether it has an effect."""

from __future__ import annotations

import ast
import re
import warnings

_IDLE = (ast.Name, ast.Constant, ast.Tuple, ast.Compare, ast.BinOp, ast.Attribute)
_EFFECTS = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
_IDLE_STATEMENTS = (*(ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.Global, ast.Nonlocal),)
_BLOCKS = (
    *(
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.If,
        ast.For,
        ast.AsyncFor,
        ast.While,
    ),
    *(ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match),
)
CODE_LINE = re.compile(
    r"\s*(?:(?:async )?def \w+\(|class \w+.*:|@\w|(?:from [\w.]+ )?import \w|print\(|return\b"
    r"|(?:for|while|if|elif|with|try|else)\b.*:\s*$|[\w.\[\]]+ ?[-+*/]?= ?\S)"
)
"""Matches a line that looks like Python, also in a text that does not parse."""


def parse_python(code: str) -> ast.Module | None:
    """The syntax tree of ``code``; None where it is no Python or too deeply nested."""
    tree = parse_or_error_line(code)
    return tree if isinstance(tree, ast.Module) else None


def parse_or_error_line(code: str) -> ast.Module | int:
    """The syntax tree of ``code``, or the number of the line with the error, from 1."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about the style of ``code``
            return ast.parse(code)
    except SyntaxError as error:
        return error.lineno or 1
    except (ValueError, RecursionError, MemoryError):  # NUL bytes, extreme nesting
        return 1


def is_program(code: str) -> bool:
    """True for Python with a statement that is more than a value: a word of prose is a value
    too.
    """
    tree = parse_python(code)
    return tree is not None and any(
        not (isinstance(node, ast.Expr) and isinstance(node.value, _IDLE)) for node in tree.body
    )


def has_effect(tree: ast.Module) -> bool:
    """True where a statement of ``tree`` has an effect. ``pass``, ``...``, strings and values have
    none, nor have functions, classes, branches and loops that contain nothing else.
    """
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _EFFECTS) or (isinstance(node, ast.ClassDef) and node.bases):
            return True
        if isinstance(node, ast.stmt) and not isinstance(node, (*_IDLE_STATEMENTS, *_BLOCKS)):
            return True
        if not isinstance(node, ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))
    return False
