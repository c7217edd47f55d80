"""Rewrites what a text of tests imports: names of the program become plain names, and imports that
the judge does not have are refused.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Container, Iterable

from ctrl_megatron.sandbox.jail.pytest_stand_in import NAMES

PROGRAM_MODULES = frozenset(
    [
        *("answer", "implementation", "main", "my_module", "my_solution", "program", "solution"),
        *("solutions", "submission", "your_module", "your_solution"),
    ]
)
"""Module names that tests use for the program's file."""
_REACH_THE_PROGRAM = ("builtins.input", "sys.stdin", "sys.stdout", "sys.stderr")


def take_program_imports(tree: ast.Module, entries: Container[str]) -> set[str]:
    """Remove from ``tree`` the imports of the program's names, and return those names. An import is
    of the program if it names a module of ``PROGRAM_MODULES``, or imports one of ``entries`` from
    a module outside the standard library.
    """
    imports = _ProgramImports(entries)
    imports.visit(tree)
    if imports.modules:
        _AttributesAsNames(imports).visit(tree)
    return imports.names


class _ProgramImports(ast.NodeTransformer):
    def __init__(self, entries: Container[str]) -> None:
        self._entries = entries
        self.names = set[str]()
        self.modules = set[str]()
        """Names that the tests give to the program's module."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.stmt]:
        root = (node.module or "").split(".")[0]
        ours = root in PROGRAM_MODULES or node.level > 0
        foreign = root not in sys.stdlib_module_names
        taken = [a for a in node.names if ours or (foreign and a.name in self._entries)]
        if not taken:
            return node
        left: list[ast.stmt] = []
        for alias in taken:
            if node.module is None and alias.name in PROGRAM_MODULES:
                self.modules.add(alias.asname or alias.name)
            elif alias.name != "*":
                self.names.add(alias.name)
                if alias.asname not in (None, alias.name):
                    left.append(ast.parse(f"{alias.asname} = {alias.name}").body[0])
        node.names = [alias for alias in node.names if alias not in taken]
        return [*([node] if node.names else []), *left] or ast.Pass()

    def visit_Import(self, node: ast.Import) -> ast.AST:
        taken = [alias for alias in node.names if alias.name in PROGRAM_MODULES]
        self.modules |= {alias.asname or alias.name for alias in taken}
        node.names = [alias for alias in node.names if alias not in taken]
        return node if node.names else ast.Pass()


class _AttributesAsNames(ast.NodeTransformer):
    """Turns ``solution.f`` into ``f``."""

    def __init__(self, imports: _ProgramImports) -> None:
        self._imports = imports

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id in self._imports.modules:
            self._imports.names.add(node.attr)
            return ast.Name(node.attr, node.ctx)
        return node


def refuse_imports(tree: ast.Module, place: str) -> None:
    """Raise ``ValueError`` for an import that the judge does not have: it has the standard library
    and the part of pytest that ``jail.pytest_stand_in`` defines. Imports inside ``try`` are left
    alone: the text handles their failure.
    """
    tried = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for statement in node.body
        for part in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in tried:
            modules = [a.name for a in node.names]
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                modules = [] if node.level or node.module is None else [node.module]
                names = [a.name for a in node.names] if modules == ["pytest"] else []
            for root in (module.split(".")[0] for module in modules):
                if root != "pytest" and root not in sys.stdlib_module_names:
                    raise ValueError(
                        f"{place} imports {root}, which the judge does not have: tests may import "
                        "Python's own modules and pytest"
                    )
            _refuse_names(names, place)
        elif isinstance(node, ast.Call) and (target := _patched(node)) is not None:
            raise ValueError(f"{place} patches {target}: that does not reach the program")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            _refuse_names([node.attr] if node.value.id == "pytest" else [], place)


def _patched(call: ast.Call) -> str | None:
    """The target of a call of ``unittest.mock.patch``, None if the patch reaches the program."""
    parts = ast.unparse(call.func).split(".")
    if "patch" not in parts or not call.args:
        return None
    target = ast.unparse(call.args[0])
    return None if target.strip("'\"") in _REACH_THE_PROGRAM else target


def _refuse_names(names: Iterable[str], place: str) -> None:
    for name in names:
        if name not in NAMES:
            known = ", ".join(NAMES)
            raise ValueError(f"{place} uses pytest.{name}; the judge has {known} of pytest")
