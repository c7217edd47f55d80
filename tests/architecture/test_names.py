"""A name means one thing: no two classes, and no two public functions, of the package share one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from package_imports import FILES, PACKAGE, tree_of


def lines_of_shared_names(
    definitions: Iterator[tuple[Path, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]],
) -> dict[str, list[str]]:
    """Name -> the lines that define it, for names with several definitions."""
    lines: dict[str, list[str]] = {}
    for file, node in definitions:
        lines.setdefault(node.name, []).append(f"{file.relative_to(PACKAGE)}:{node.lineno}")
    return {name: where for name, where in lines.items() if len(where) > 1}


def test_no_two_classes_share_a_name() -> None:
    classes = (
        (file, node)
        for file in FILES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ClassDef)
    )
    assert lines_of_shared_names(classes) == {}


def test_no_two_public_functions_of_modules_share_a_name() -> None:
    functions = (
        (file, node)
        for file in FILES
        for node in tree_of(file).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        # Every command has a ``main``.
        if not node.name.startswith("_") and node.name != "main"
    )
    assert lines_of_shared_names(functions) == {}
