"""Whether a text is Python, and whether it does anything."""

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
"""Matches what looks like a line of Python, also of one that does not parse."""


def parsed(code: str) -> ast.Module | None:
    """The syntax tree of ``code``; None for what is no Python, or too deeply nested to be read."""
    tree = tree_or_line(code)
    return tree if isinstance(tree, ast.Module) else None


def tree_or_line(code: str) -> ast.Module | int:
    """The syntax tree of ``code``, or the line of the error, from 1."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the program's style, not ours
            return ast.parse(code)
    except SyntaxError as error:
        return error.lineno or 1
    except (ValueError, RecursionError, MemoryError):  # NUL bytes, absurd nesting
        return 1


def is_program(code: str) -> bool:
    """Python of which a line does something: a lone word of prose is an expression, too."""
    tree = parsed(code)
    return tree is not None and any(
        not (isinstance(node, ast.Expr) and isinstance(node.value, _IDLE)) for node in tree.body
    )


def does_something(tree: ast.Module) -> bool:
    """Whether a statement of ``tree`` has an effect: not with ``pass``, ``...``, texts and values
    alone, nor with functions, classes, branches and loops of nothing else.
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
