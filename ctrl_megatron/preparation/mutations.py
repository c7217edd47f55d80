"""Mutations: right programs in which one expression was changed.

Pure; runs nothing. A mutation is an edit of the source text, so the rest of the program keeps its
layout. A critic is asked for the smallest expression around the edit that occurs once and is long
enough to be recognised.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

MutationKind = Literal["operator", "comparison", "constant", "name", "unary"]

_SHORTEST = 5
"""Fewest characters of an expression that a critique names."""
_OPERATORS: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("+", "**")),
    ast.Div: ("/", ("//", "*")),
    ast.FloorDiv: ("//", ("/", "%")),
    ast.Mod: ("%", ("//",)),
    ast.Pow: ("**", ("*",)),
}
_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<",)),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">",)),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
_JUNCTIONS: dict[type[ast.boolop], tuple[str, str]] = {
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
_PAIRS = (
    ("min", "max"),
    ("any", "all"),
    ("sum", "len"),
    ("lower", "upper"),
    ("startswith", "endswith"),
    ("append", "extend"),
    ("keys", "values"),
    ("islower", "isupper"),
    ("isalpha", "isalnum"),
    ("find", "rfind"),
    ("lstrip", "rstrip"),
)
_NAMES = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One edit and the resulting program."""

    kind: MutationKind
    code: str
    """The program with the fault."""
    wrong: str
    """The expression around the edit, which occurs once in ``code``."""
    right: str
    """The original expression."""


def mutations(code: str) -> list[Mutation]:
    """All mutations of ``code``, in the order of the text. A program with nested functions has
    none, because a small model confuses their names and returns.

    Raises SyntaxError.
    """
    tree = ast.parse(code)
    if _nests(tree):
        return []
    source = _Source(code)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found: dict[str, Mutation] = {}
    for node in ast.walk(tree):
        for kind, start, end, text in [*_edits(node, source), *_swaps(node, parents, source)]:
            mutant = code[:start] + text + code[end:]
            if mutant == code or mutant in found or not _parses(mutant):
                continue
            named = _named_expression(node, parents, source, (start, end, text), mutant)
            if named is not None:
                found[mutant] = Mutation(kind=kind, code=mutant, wrong=named[0], right=named[1])
    return sorted(found.values(), key=lambda m: (_first_difference(code, m.code), m.code))


class _Source:
    """Character positions of nodes, which ``ast`` counts in bytes of UTF-8 per line."""

    def __init__(self, code: str) -> None:
        self._lines = [line.encode() for line in code.split("\n")]
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line.decode()) + 1)
        self.code = code

    def span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._at(node.lineno, node.col_offset),
            self._at(node.end_lineno, node.end_col_offset),
        )

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())

    def between(self, left: ast.expr, right: ast.expr, sign: str) -> tuple[int, int] | None:
        """Span of the operator ``sign`` between two operands; None if it cannot be located."""
        start, end = self.span(left)[1], self.span(right)[0]
        words = self.code[start:end]
        if words.strip("() \n\\") != sign:  # a comment, or white space within "not in"
            return None
        at = start + words.index(sign)
        return at, at + len(sign)


_Edit = tuple[MutationKind, int, int, str]


def _edits(node: ast.AST, source: _Source) -> Iterator[_Edit]:
    """(kind, start, end, new text) of the edits at ``node`` itself."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        sign, others = _OPERATORS[type(node.op)]
        yield from _signs("operator", source.between(node.left, node.right, sign), others)
    elif isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for left, right, op in zip(operands, operands[1:], node.ops, strict=False):
            if type(op) in _COMPARISONS:
                sign, others = _COMPARISONS[type(op)]
                yield from _signs("comparison", source.between(left, right, sign), others)
    elif isinstance(node, ast.BoolOp):
        sign, other = _JUNCTIONS[type(node.op)]
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from _signs("operator", source.between(left, right, sign), (other,))
    elif isinstance(node, ast.Constant):
        yield from _constants(node, source)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in _NAMES:
        yield ("name", *source.span(node), _NAMES[node.id])
    elif isinstance(node, ast.Attribute) and node.attr in _NAMES:
        end = source.span(node)[1]
        yield "name", end - len(node.attr), end, _NAMES[node.attr]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "unary", source.span(node)[0], source.span(node.operand)[0], ""


def _swaps(node: ast.AST, parents: dict[ast.AST, ast.AST], source: _Source) -> Iterator[_Edit]:
    """One parameter of the function where another is read."""
    if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
        return
    function = parents.get(node)
    while function is not None and not isinstance(function, ast.FunctionDef):
        function = parents.get(function)
    if function is not None:
        parameters = [a.arg for a in function.args.args]
        if node.id in parameters:
            for other in parameters:
                if other != node.id:
                    yield ("name", *source.span(node), other)


def _signs(
    kind: MutationKind, place: tuple[int, int] | None, others: tuple[str, ...]
) -> Iterator[_Edit]:
    if place is not None:
        for other in others:
            yield kind, *place, other


def _constants(node: ast.Constant, source: _Source) -> Iterator[_Edit]:
    start, end = source.span(node)
    if isinstance(node.value, bool):
        yield "constant", start, end, str(not node.value)
    elif isinstance(node.value, int) and source.code[start:end].isdecimal():
        yield "constant", start, end, str(node.value + 1)
        if node.value > 0:
            yield "constant", start, end, str(node.value - 1)


def _named_expression(
    node: ast.AST,
    parents: dict[ast.AST, ast.AST],
    source: _Source,
    edit: tuple[int, int, str],
    mutant: str,
) -> tuple[str, str] | None:
    """(wrong, right): the smallest expression around the edit that can be named, on one line."""
    start, end, text = edit
    around: ast.AST | None = node
    while around is not None:
        if isinstance(around, ast.expr) and not isinstance(around, ast.JoinedStr | ast.Slice):
            first, last = source.span(around)
            right = source.code[first:last]
            wrong = source.code[first:start] + text + source.code[end:last]
            whole = first <= start and end <= last and "\n" not in right
            if whole and len(wrong) >= _SHORTEST and count_occurrences(mutant, wrong) == 1:
                return wrong, right
        around = parents.get(around)
    return None


def smallest_edit(right: str, wrong: str) -> tuple[str, str] | None:
    """(expression of ``wrong``, expression of ``right``): the smallest ones, or else lines, that
    differ, where putting the second in place of the first turns ``wrong`` into ``right``. None
    where the programs differ in more than one line, or the place occurs more than once.

    Raises SyntaxError for a program that is no Python.
    """
    if right == wrong:
        return None
    start = _first_difference(right, wrong)
    after = min(len(right), len(wrong)) - start
    after = min(after, _first_difference(right[::-1], wrong[::-1]))
    end, text = len(right) - after, wrong[start : len(wrong) - after]
    if "\n" in right[start:end] + text:
        return None
    source, tree = _Source(right), ast.parse(right)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    spans = {node: source.span(node) for node in ast.walk(tree) if isinstance(node, ast.expr)}
    around = [node for node, (first, last) in spans.items() if first <= start and end <= last]
    if around:
        smallest = min(around, key=lambda node: spans[node][1] - spans[node][0])
        named = _named_expression(smallest, parents, source, (start, end, text), wrong)
        if named is not None:
            return named
    line, repair = (_line_at(code, start).strip() for code in (wrong, right))
    fits = len(line) >= _SHORTEST and repair and count_occurrences(wrong, line) == 1
    return (line, repair) if fits and wrong.replace(line, repair) == right else None


def _line_at(code: str, place: int) -> str:
    return code[code.rfind("\n", 0, place) + 1 :].partition("\n")[0]


def count_occurrences(code: str, expression: str) -> int:
    """The number of occurrences of ``expression`` in ``code``, overlapping ones included."""
    return sum(code.startswith(expression, at) for at in range(len(code)))


def _nests(tree: ast.Module) -> bool:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    outer = [node for node in ast.walk(tree) if isinstance(node, functions)]
    return any(
        isinstance(inner, functions) for f in outer for inner in ast.walk(f) if inner is not f
    )


def _parses(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except SyntaxError:
        return False
    return True


def _first_difference(a: str, b: str) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
