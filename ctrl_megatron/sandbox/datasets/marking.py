"""Writes the text of a test in which every check about the program records its evaluation
(``jail.evidence``) and every call that is made for its changes returns them (``changing_calls``).
This file decides what a check is about; only the run decides whether it was evaluated, and after a
call of the program.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ctrl_megatron.sandbox.datasets.changing_calls import changing_calls
from ctrl_megatron.sandbox.datasets.provenance import (
    COMPREHENSIONS,
    LEADS,
    Names,
    ProgramNames,
    joined,
)
from ctrl_megatron.sandbox.datasets.syntax import (
    is_main_guard,
    is_vacuous,
    may_fail,
    own_parts,
    walk_code,
)
from ctrl_megatron.sandbox.jail.evidence import CHANGING, MADE_IN_CALL, NAME

_SHAPES = (ast.BoolOp, ast.IfExp, ast.NamedExpr, ast.Lambda, *COMPREHENSIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedTests:
    """``setup`` and ``tests`` as the judge runs them; None for a test that needs no marks because
    it always calls the program. ``unchecked`` are the indices of tests that check nothing of the
    program.
    """

    setup: str
    tests: tuple[str | None, ...]
    unchecked: tuple[int, ...]


def mark_tests(
    setup: str, setup_tree: ast.Module, trees: Sequence[ast.Module], stubs: Iterable[str]
) -> MarkedTests:
    """Mark tests that call ``stubs`` of the program; the trees are modified. Raises ``ValueError``
    for texts that are nested too deeply.
    """
    try:
        return _mark(setup, setup_tree, trees, frozenset(stubs))
    except RecursionError as error:
        raise ValueError("the tests are nested too deeply") from error


def _mark(
    setup: str, setup_tree: ast.Module, trees: Sequence[ast.Module], stubs: frozenset[str]
) -> MarkedTests:
    reading = ProgramNames(dict.fromkeys(stubs, LEADS))
    names = reading.read(_pruned(setup_tree).body, dict.fromkeys(stubs, LEADS))
    texts: list[str | None] = []
    unchecked: list[int] = []
    for index, tree in enumerate(trees):
        names |= dict.fromkeys(stubs, LEADS)
        if (assertion := _plain_assert(tree, names)) is not None:
            reading.leaves[assertion.test] = MADE_IN_CALL
            texts.append(_marked(tree, reading) if any(changing_calls(tree)) else None)
            continue
        reading.checks = False
        names = joined(names, reading.read(_pruned(tree).body, names))
        if not (reading.checks or reading.checks_in(tree)):
            unchecked.append(index)
        texts.append(_marked(tree, reading))
    # Only after all tests it is known which functions of the setup get values of the program.
    noted = any(
        isinstance(node, (ast.Assert, ast.Try)) or node in reading for node in ast.walk(setup_tree)
    )
    if not noted:
        setup_tree = ast.parse(setup)  # as written: nothing pruned
    if noted or any(changing_calls(setup_tree)):
        setup = _marked(setup_tree, reading)
    return MarkedTests(setup=setup, tests=tuple(texts), unchecked=tuple(unchecked))


def _plain_assert(tree: ast.Module, names: Names) -> ast.Assert | None:
    """The only statement of ``tree`` if it is an assert that always calls the program."""
    only = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(only, ast.Assert):
        return None
    test, calls = only.test, False
    if isinstance(test, (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.JoinedStr)):
        return None
    if isinstance(test, ast.Compare) and len(test.ops) > 1:
        return None
    for node in walk_code(test):
        if isinstance(node, _SHAPES):
            return None
        calls |= (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and names.get(node.func.id) == LEADS
        )
    return only if calls else None


def _marked(tree: ast.Module, reading: ProgramNames) -> str:
    return ast.unparse(_Marker(reading, frozenset(changing_calls(tree))).visit(tree))


def _says(method: str, *arguments: ast.expr | bool) -> ast.Call:
    """A call of a method of the ``Evidence``."""
    given = [a if isinstance(a, ast.expr) else ast.Constant(a) for a in arguments]
    function = ast.Attribute(ast.Name(NAME, ast.Load()), method, ast.Load())
    return ast.Call(function, given, [])


class _Marker(ast.NodeTransformer):
    def __init__(self, reading: ProgramNames, changing: frozenset[ast.Call]) -> None:
        self._reading = reading
        self._changing = changing
        self._goes_on = False
        """Whether the current loop has an ``else`` that fails, so that ``break`` and ``continue``
        matter."""

    def visit(self, node: Any) -> Any:
        marked, reading = super().visit(node), self._reading
        if node in self._changing and node not in reading.asserting:
            marked.func = ast.Call(ast.Name(CHANGING, ast.Load()), [marked.func], [])
        if node in reading.leaves:
            return _says("seen", _says("now"), ast.Constant(reading.leaves[node]), marked)
        if node in reading.asserting:
            return _says("passed", _says("now"), ast.Constant(reading.asserting[node]), marked)
        if node in reading.given:
            return _says("about", marked)
        if node in reading.expecting:
            return [marked, ast.Expr(_says("raised"))]
        return marked

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        self.generic_visit(node)
        if not is_vacuous(node.test):
            node.test = _says("held", node.test)
        return node

    def visit_For(self, node: ast.For) -> ast.For:
        before, self._goes_on = self._goes_on, any(map(may_fail, node.orelse))
        self.generic_visit(node)
        self._goes_on = before
        return node

    def visit_Try(self, node: ast.Try) -> ast.Try:
        checks = any(map(may_fail, node.body))
        for handler in node.handlers:
            self._mark_handler(handler, checks)
        self.generic_visit(node)
        return node

    def _mark_handler(self, node: ast.ExceptHandler, checks: bool) -> None:
        parts = [part for statement in node.body for part in own_parts(statement)]
        answers = any(
            isinstance(part, (ast.Assign, ast.AugAssign, ast.NamedExpr, ast.Raise, ast.Assert))
            or (isinstance(part, ast.Return) and part.value is not None)
            or (isinstance(part, (ast.Break, ast.Continue)) and self._goes_on)
            for part in parts
        ) or any(map(may_fail, node.body))
        counts = node in self._reading.handlers
        node.body.insert(0, ast.Expr(_says("caught", counts, answers, checks)))


class _Pruner(ast.NodeTransformer):
    """Removes code that never runs, and the main guard around code that runs when a file is the
    program.
    """

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        taken = _known(node.test)
        if taken is None:
            return node
        return (node.body if taken else node.orelse) or ast.Pass()

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        return ast.Pass() if _known(node.test) is False else node

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        empty = isinstance(node.iter, (ast.List, ast.Tuple)) and not node.iter.elts
        return (node.orelse or ast.Pass()) if empty else node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            ends = (ast.Return, ast.Raise, ast.Continue, ast.Break)
            end = next((i for i, part in enumerate(body, 1) if isinstance(part, ends)), len(body))
            del body[end:]
        return node


def _pruned(tree: ast.Module) -> ast.Module:
    return _Pruner().visit(tree)


def _known(test: ast.expr) -> bool | None:
    """The value of a condition if it is known before the run, else None."""
    if is_main_guard(test):
        return True
    return bool(test.value) if isinstance(test, ast.Constant) else None
