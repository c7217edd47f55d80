"""CTRL's normal form of a program: a statistic, because different behaviours can share it."""

from __future__ import annotations

import ast
import warnings


def normalize_code(code_str: str) -> str:
    """Rename assigned variables to ``v_0, v_1, ...`` and lay the program out afresh.

    Names are numbered in the order in which a visit of the syntax tree first meets them as the
    target of an assignment; one table serves all scopes. Functions, classes, arguments, attributes,
    imports and names that are read before they are assigned keep their names. What does not parse
    is returned unchanged. Raises ``TypeError`` for anything but a string. Source: CTRL,
    ``critic_rm.py``.
    """
    if not isinstance(code_str, str):
        raise TypeError(f"normalize_code needs a str, got {type(code_str).__name__}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the program's style, not ours
            tree = ast.parse(code_str)
        return ast.unparse(_Renamer().visit(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # ValueError: NUL bytes, numbers too long to print. The last two: absurd nesting.
        return code_str


class _Renamer(ast.NodeTransformer):
    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if isinstance(node.ctx, ast.Store):
            self._names.setdefault(node.id, f"v_{len(self._names)}")
        return ast.Name(id=self._names.get(node.id, node.id), ctx=node.ctx)
