"""Diagnoses the fault of an attempt from its verdict and its text. Pure; runs nothing."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from ctrl_megatron.prompts import extract_code
from ctrl_megatron.prompts.python_source import parse_or_error_line
from ctrl_megatron.types import Attempt, Verdict

Fault = Literal["none", "syntax", "missing", "timeout", "exception", "died", "no_return", "wrong"]
Shape = Literal["recursion", "loop", "branch", "formula"]

# Anchored at the start of a detail: the rest may contain text of the program.
_WHERE = r"(?:the program failed to load: |not run: )?"
_TIMEOUT = re.compile(_WHERE + r"(?:timeout|time ?limit ?exceeded)", re.IGNORECASE)
_DIED = re.compile(_WHERE + r"(?:the program ended|killed|exit status)", re.IGNORECASE)
_EXCEPTION = re.compile(
    r"(?:the program failed to load: |exit status -?\d+: )?(?:CandidateException: )?"
    r"(?:\w+\.)*([A-Z]\w*(?:Error|Exception|Exit|Interrupt|Iteration))\b"
)
_UNDEFINED = re.compile(r"name '([A-Za-z_]\w{0,30})' is not defined")
_NOT_A_CRASH = {"AssertionError", "TimeLimitError", "TimeoutError"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The facts that a critique may state: no text of a test or of the program's output."""

    fault: Fault
    name: str
    """The function under test; empty for a program."""
    parameters: tuple[str, ...] = ()
    """The parameter names of that function in the attempt."""
    shape: Shape = "formula"
    """The main construct of the function."""
    failed: int
    """Tests that failed."""
    total: int
    """Tests that were run."""
    exception: str = ""
    """Type of the most frequent exception; empty for none."""
    undefined: str = ""
    """The name that a ``NameError`` reports; empty for none."""
    line: int = 0
    """Line of the syntax error, from 1; 0 for none."""


def diagnose(attempt: Attempt, verdict: Verdict) -> Diagnosis:
    """The reason why ``attempt`` got ``verdict``: the most serious fault."""
    name = attempt.problem.entry_point.split(", ")[0].rpartition(".")[2]
    failed, total = verdict.passed.count(False), len(verdict.passed)
    tree = parse_or_error_line(extract_code(attempt.solution))
    if isinstance(tree, int):
        fault: Fault = "none" if verdict.accepted else "syntax"
        return Diagnosis(fault=fault, name=name, failed=failed, total=total, line=tree)
    function = _find(tree, name)
    exception, undefined = _crash(verdict)
    return Diagnosis(
        fault=_fault(verdict, name, tree, function, exception),
        name=name,
        parameters=() if function is None else tuple(a.arg for a in function.args.args),
        shape=_shape(function or tree, name),
        failed=failed,
        total=total,
        exception=exception,
        undefined=undefined,
    )


def _fault(
    verdict: Verdict, name: str, tree: ast.Module, function: ast.AST | None, exception: str
) -> Fault:
    if verdict.accepted:
        return "none"
    if name and function is None and not _binds(tree, name):
        return "missing"
    if any(map(_TIMEOUT.match, verdict.detail)):
        return "timeout"
    if exception:
        return "exception"
    if any(map(_DIED.match, verdict.detail)):
        return "died"
    if function is not None and not _returns(function):
        return "no_return"
    return "wrong"


def _find(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    nodes = (node for scope in (tree, *classes) for node in scope.body)
    return next((node for node in nodes if isinstance(node, functions) and node.name == name), None)


def _binds(tree: ast.Module, name: str) -> bool:
    """Whether ``name`` is bound without a ``def`` at the top: assigned, imported, or a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
    return False


def _returns(function: ast.AST) -> bool:
    returned = (
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom)
    )
    return any(node.value is not None or isinstance(node, ast.Yield) for node in returned)


def _shape(scope: ast.AST, name: str) -> Shape:
    nodes = list(ast.walk(scope))
    called = {
        node.func.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    if name and name in called:
        return "recursion"
    if any(isinstance(node, ast.For | ast.While | ast.comprehension) for node in nodes):
        return "loop"
    return "branch" if any(isinstance(node, ast.If | ast.IfExp) for node in nodes) else "formula"


def _crash(verdict: Verdict) -> tuple[str, str]:
    """The most frequent exception type of the failed tests, and the undefined name if any."""
    found = (match for detail in verdict.detail if (match := _EXCEPTION.match(detail)))
    types = Counter(match[1] for match in found if match[1] not in _NOT_A_CRASH)
    if not types:
        return "", ""
    commonest = types.most_common(1)[0][0]
    missing = _UNDEFINED.search(" ".join(verdict.detail)) if commonest == "NameError" else None
    return commonest, missing[1] if missing else ""
