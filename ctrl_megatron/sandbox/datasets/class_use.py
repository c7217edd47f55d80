"""Decides from the text of tests which names can only mean a class."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from ctrl_megatron.sandbox.datasets.syntax import called_name
from ctrl_megatron.sandbox.jail.codec import DATA_ATTRIBUTES

_DATA_KINDS = (str, bytes, int, float, complex, list, tuple, dict, set)
_ASKS_FOR_KIND = frozenset(("isinstance", "issubclass"))
_RAISES = frozenset(("assertRaises", "assertRaisesRegex", "raises", "suppress"))


def used_as_classes(trees: Sequence[ast.AST], stubs: Container[str]) -> set[str]:
    """The ``stubs`` that the tests use as classes: they read an attribute of the name, use it
    with ``isinstance`` or ``with``, or read attributes of its instances that no one type of data
    has.
    """
    names = _names_of(trees, stubs)
    found: set[str] = set()
    attributes: dict[str, set[str]] = defaultdict(set)
    for tree in trees:
        made = _variables(tree, names)
        for node in ast.walk(tree):
            found.update(names[name] for name in _certain(node, names))
            if isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
                maker = made.get(_place(node.value)) or names.get(_callee(node.value))
                if maker is not None:
                    attributes[maker].add(node.attr)
    return found | {name for name, asked in attributes.items() if not _data_has(asked)}


def _names_of(trees: Sequence[ast.AST], stubs: Container[str]) -> dict[str, str]:
    """The names by which the tests call the program's names: their own, aliases, and the parameter
    of ``check``.
    """
    names: dict[str, str] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in stubs:
                names[node.id] = node.id
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                aliases = [target.id for target in node.targets if isinstance(target, ast.Name)]
                names.update(dict.fromkeys(aliases, node.value.id))
        for node in ast.walk(tree):
            given = node.args[:1] if isinstance(node, ast.Call) else ()
            if is_call_of(node, {"check"}) and given and isinstance(given[0], ast.Name):
                names.update(dict.fromkeys(_parameters(trees), given[0].id))
    return {name: stub for name, stub in names.items() if stub in stubs}


def _parameters(trees: Sequence[ast.AST]) -> Iterator[str]:
    """The first parameter of each function ``check``."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "check" and node.args.args:
                yield node.args.args[0].arg


def caught(trees: Iterable[ast.AST]) -> set[str]:
    """Names that the tests catch or expect as exceptions."""
    found: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                found.update(_names(node.type))
            elif isinstance(node, ast.Call) and called_name(node) in _RAISES:
                found.update(name for argument in node.args[:1] for name in _names(argument))
    return found


def is_call_of(node: ast.AST | None, names: Container[str]) -> bool:
    """Whether ``node`` calls one of ``names``."""
    return _callee(node) in names


def _callee(node: ast.AST | None) -> str:
    """The called name, empty if ``node`` does not call a plain name."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.id if isinstance(function, ast.Name) else ""


def _certain(node: ast.AST, names: Container[str]) -> Iterator[str]:
    """Names that must be classes because of this node alone."""
    if isinstance(node, ast.Attribute) and not node.attr.startswith(("__", "cache_")):
        yield from (name for name in _names(node.value) if name in names)
    elif isinstance(node, ast.Call) and called_name(node) in _ASKS_FOR_KIND:
        yield from (n for argument in node.args[1:2] for n in _names(argument) if n in names)
    elif isinstance(node, ast.withitem) and is_call_of(node.context_expr, names):
        yield _callee(node.context_expr)
    elif isinstance(node, ast.ClassDef):
        yield from (name for base in node.bases for name in _names(base) if name in names)


def _variables(tree: ast.AST, names: Mapping[str, str]) -> dict[str, str]:
    """Variables that are assigned only by calls of one of ``names``, and the stub that
    is called.
    """
    made: dict[str, str] = {}
    stored: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
            stored[_place(node)] += 1
        if isinstance(node, ast.AugAssign):
            stored[_place(node.target)] -= 1
        targets: list[ast.expr] = []
        value: ast.expr | None = None
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            targets, value = [node.target], node.value
        if is_call_of(value, names):
            for target in map(_place, targets):
                made[target] = names[_callee(value)]
                stored[target] -= 1
    return {place: stub for place, stub in made.items() if place and stored[place] == 0}


def _place(node: ast.expr) -> str:
    """A variable, or an attribute of one, as text; empty for other expressions."""
    if isinstance(node, ast.Attribute):
        owner = _place(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _data_has(attributes: set[str]) -> bool:
    """Whether one type of data has all of the attributes."""
    return any(attributes <= set(dir(kind)) for kind in _DATA_KINDS) or (
        attributes <= DATA_ATTRIBUTES and len(attributes) == 1
    )


def _names(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Tuple):
        return [name for item in node.elts for name in _names(item)]
    return [node.id] if isinstance(node, ast.Name) else []
