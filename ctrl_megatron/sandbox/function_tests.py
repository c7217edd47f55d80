"""Reading the tests of a function problem: which names are the program's, what the program may see
of them.
"""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_REMEMBERED_PROBLEMS = 512
_REMEMBERED_CHARACTERS = 1 << 15
_BUILTINS = frozenset({*dir(builtins), "__name__", "__file__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTests:
    """Tests of one problem, ready for the judge."""

    tests: tuple[str, ...]
    setup: str
    """Runs in the judge before the tests."""
    prelude: str
    """The setup's imports: all of it that the program gets."""
    stubs: tuple[str, ...]
    """Names that the program has to define."""


def read_function_tests(data: dict[str, Any]) -> FunctionTests:
    """From ``provided_data`` with ``test_list``, ``test_setup_code`` and ``entry_point`` (a name or
    several).

    Which names are calls into the program follows from the record alone, never from the program:
    the entry points and every name the tests use that is neither a builtin nor defined by the setup
    or a test; where there is none, the one builtin's name that every test calls. Raises
    ``ValueError`` for a record that cannot be judged.
    """
    tests = data.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise ValueError(
            "provided_data.test_list must be a non-empty list of strings of Python code"
        )
    setup = data.get("test_setup_code") or ""
    if not isinstance(setup, str):
        raise ValueError("provided_data.test_setup_code must be a string")
    entry = data.get("entry_point") or ()
    entries = (entry,) if isinstance(entry, str) else tuple(entry)
    if not all(isinstance(name, str) and name.isidentifier() for name in entries):
        raise ValueError(f"provided_data.entry_point must be a function's name, got {entry!r}")
    small = len(setup) + sum(map(len, tests)) <= _REMEMBERED_CHARACTERS
    return (_read_once if small else _read)(tuple(tests), setup, entries)


def _read(tests: tuple[str, ...], setup: str, entries: tuple[str, ...]) -> FunctionTests:
    setup_tree = _parse(setup, "provided_data.test_setup_code")
    trees = [_parse(t, f"provided_data.test_list[{i}]") for i, t in enumerate(tests)]
    if entries and "candidate" in _free_names([setup_tree, *trees]) - set(entries):
        setup = f"candidate = {entries[0]}\n{setup}"
        setup_tree = _parse(setup, "provided_data.test_setup_code")
    stubs = set(entries) | _free_names([setup_tree, *trees])
    if not entries and any(alias.name == "*" for alias in _aliases(setup_tree)):
        raise ValueError(
            "provided_data.test_setup_code imports *, which may hide the program's functions; "
            "give provided_data.entry_point"
        )
    return FunctionTests(
        tests=tests,
        setup=_keeping(entries, setup),
        prelude=_imports(setup_tree),
        stubs=tuple(sorted(stubs or _shadowed_builtin(trees))),
    )


# A group of rollouts asks for the same problem again and again.
_read_once = functools.lru_cache(_REMEMBERED_PROBLEMS)(_read)


def _keeping(entries: tuple[str, ...], setup: str) -> str:
    """``setup`` after which the entry points are the program's again, whatever it imports or
    defines: otherwise the tests would judge a function of the setup.
    """
    if not entries or not setup.strip():
        return setup
    before = "".join(f"_program_{name} = {name}\n" for name in entries)
    after = "".join(f"\n{name} = _program_{name}" for name in entries)
    return f"{before}{setup}\n{after}"


def _aliases(tree: ast.Module) -> Iterable[ast.alias]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.alias))


def _parse(source: str, where: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where} is not valid Python: {error}") from error


def _free_names(trees: Iterable[ast.Module]) -> set[str]:
    loaded: set[str] = set()
    bound = set(_BUILTINS)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            else:
                bound.update(_bindings(node))
    return loaded - bound


def _bindings(node: ast.AST) -> Iterable[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (node.name,)
    if isinstance(node, ast.arg):
        return (node.arg,)
    if isinstance(node, ast.alias):
        return ((node.asname or node.name).split(".")[0],)
    if isinstance(node, ast.ExceptHandler) and node.name:
        return (node.name,)
    return ()


def _shadowed_builtin(trees: list[ast.Module]) -> set[str]:
    """A problem may ask for a function of a builtin's name: then every test calls that one name and
    no other.
    """
    called = [
        {
            n.func.id
            for n in ast.walk(tree)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        for tree in trees
    ]
    names = set().union(*called)
    if len(names) != 1 or not all(called):
        raise ValueError(
            "the tests name no function of the program; give provided_data.entry_point"
        )
    return names


def _imports(tree: ast.Module) -> str:
    kept = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return "\n".join(ast.unparse(node) for node in kept)
