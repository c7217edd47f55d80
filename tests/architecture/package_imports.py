"""The modules that the files of the package import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ctrl_megatron"
NAME = PACKAGE.name
FILES = sorted(PACKAGE.rglob("*.py"))
"""Every source file of the package."""


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module."""

    module: str
    line: int
    at_load: bool
    """Whether loading the file runs it: not inside a function, not for type checkers only."""
    names: tuple[str, ...] = ()
    """The names that ``from module import ...`` imports."""


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports_of(file: Path) -> tuple[Import, ...]:
    """Every import of the file, those inside functions, under TYPE_CHECKING and by
    ``import_module("literal")`` included.
    """
    return tuple(_imports(tree_of(file), at_load=True))


def _imports(node: ast.AST, *, at_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_load)
        elif isinstance(child, ast.ImportFrom):
            dots = "." * child.level
            names = tuple(alias.name for alias in child.names)
            yield Import(dots + (child.module or ""), child.lineno, at_load, names)
            if child.module == NAME:
                yield from (Import(f"{NAME}.{a.name}", child.lineno, at_load) for a in child.names)
        elif (called := _imported_by_call(child)) is not None:
            yield Import(called, child.lineno, at_load)  # type: ignore[attr-defined]
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _imports(ast.Module(child.body, []), at_load=False)
            yield from _imports(ast.Module(child.orelse, []), at_load=at_load)
        else:
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(child, at_load=at_load and not function)


def _imported_by_call(node: ast.AST) -> str | None:
    """``import_module("x")``, ``importlib.import_module("x")`` and ``__import__("x")`` give x."""
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
        return None
    name = ast.unparse(node.func).rpartition(".")[2]
    return str(node.args[0].value) if name in ("import_module", "__import__") else None


def library(module: str) -> str:
    """The library that a module belongs to."""
    return module.split(".")[0]


def module_name(file: Path) -> str:
    """The dotted name of a source file of the package."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_graph() -> dict[str, set[str]]:
    """Module of the package -> the modules of the package that it imports, anywhere in its file.

    ``from package import module`` is an import of the module, not of the package.
    """
    graph: dict[str, set[str]] = {module_name(file): set() for file in FILES}
    for file in FILES:
        for entry in imports_of(file):
            inner = {f"{entry.module}.{name}" for name in entry.names}
            known = inner & graph.keys()
            graph[module_name(file)] |= known
            if known != inner or not inner:
                graph[module_name(file)] |= {entry.module} & graph.keys()
    return graph
