"""Rows of HumanEval, HumanEval+ and MBPP+: one test per input, for every form of the files.

Source: HumanEval (arXiv 2107.03374) and EvalPlus (arXiv 2305.01210), whose data sets come in two
forms: with a test program of literal inputs and results (``OriginFmt``), and with inputs only, for
which the reference computes the results. JSON has turned MBPP+'s tuples into lists in the latter.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from typing import Any

from ctrl_megatron.errors import UserError
from ctrl_megatron.problems.fields import non_empty_list_field, text_field
from ctrl_megatron.sandbox.datasets.functions import human_eval_tests, read_function_tests
from ctrl_megatron.types import Problem

_WORD = re.compile(r"\b(?:inp|exp)\b")
_REFERENCE = "_reference_solution"
_NUMPY = "import numpy as np"
_CLOSE = """
class np:
    ndarray, float64, float32 = (), float, float
    def allclose(got, wanted, rtol, atol):
        if isinstance(wanted, (list, tuple)):
            return len(got) == len(wanted) and all(
                np.allclose(a, b, rtol, atol) for a, b in zip(got, wanted)
            )
        same = got == wanted or got != got and wanted != wanted
        return same or abs(got - wanted) <= atol + rtol * abs(wanted)
"""
"""The part of numpy that the published test programs use; the sandbox has no numpy. Two NaN results
are equal."""
_SAME = """
from builtins import dict as _dict, float as _float, int as _int, list as _list, tuple as _tuple
def _same(got, wanted, atol):
    if isinstance(got, (_list, _tuple)) and isinstance(wanted, (_list, _tuple)):
        pairs = zip(got, wanted)
        return len(got) == len(wanted) and all(_same(a, b, atol) for a, b in pairs)
    if isinstance(wanted, _float) and isinstance(got, (_int, _float)):
        return got == wanted or got != got and wanted != wanted or abs(got - wanted) <= (
            atol or 1e-6) + 1e-7 * abs(wanted)
    return got == wanted
"""
"""EvalPlus' comparison: floats differ by at most ``atol`` (1e-6 if it is 0), other values are
equal.
"""


_DECISION = "exact_match"


def human_eval_problem(record: Mapping[str, Any], number: int) -> Problem:
    """A row of HumanEval or HumanEval+, in either form."""
    data = {name: text_field(record.get(name), name) for name in ("prompt", "entry_point")}
    reference = data["prompt"] + text_field(record.get("canonical_solution"), "canonical_solution")
    if "test" not in record:  # as the small form of HumanEval+ has it
        tests, setup = _against_reference(record, reference, ("base_input", "plus_input"))
        name, entry = str(record.get("task_id")), data["entry_point"]
        return _problem(name, data["prompt"], entry, tests, setup, reference)
    data["test"] = text_field(record.get("test"), "test")
    looped = unrolled_tests(data["test"], data["entry_point"])
    if looped:
        _, tests, setup = looped
        _, helpers = human_eval_tests({**data, "test": None, "test_list": list(tests)})
        setup = "\n".join(filter(None, (helpers, setup)))
    else:
        found, setup = human_eval_tests(data)
        tests = tuple(found)
    if record.get("plus_input"):
        more, own = _against_reference(record, reference, ("plus_input",))
        tests, setup = (*tests, *more), f"{setup}\n{own}"
    return _problem(
        str(record.get("task_id")), data["prompt"], data["entry_point"], tests, setup, reference
    )


def mbpp_plus_problem(record: Mapping[str, Any], number: int) -> Problem:
    """A row of MBPP+, in either form."""
    name = f"mbppplus/{str(record.get('task_id')).removeprefix('Mbpp/')}"
    statement = text_field(record.get("prompt"), "prompt").strip().strip('"').strip()
    if "plus_input" in record:
        entry = text_field(record.get("entry_point"), "entry_point")
        reference = text_field(record.get("canonical_solution"), "canonical_solution")
        tests, setup = _against_reference(record, reference, ("base_input", "plus_input"))
        return _problem(name, statement, entry, tests, setup, reference.strip("\n"))
    reference = text_field(record.get("code"), "code").strip("\n")
    test = text_field(record.get("test"), "test")
    looped = unrolled_tests(test, None)
    if looped is None:
        raise UserError("column 'test' is no loop over inputs that calls one function with them")
    return _problem(name, statement, *looped, reference)


def unrolled_tests(text: str, entry: str | None) -> tuple[str, tuple[str, ...], str] | None:
    """(the tested function's name, one test per input, the rest of the program as setup) of a test
    program that loops over ``inputs`` (and ``results``) at its top level or in
    ``check(candidate)``; None for any other program.

    ``entry`` is the function's name; None if the loop calls it by its name. Raises ``ValueError``
    for text that is not Python.
    """
    tree = _parse(text, "test")
    check = next((n for n in tree.body if getattr(n, "name", "") == "check"), None)
    body = check.body if isinstance(check, ast.FunctionDef) else tree.body
    lists = {
        node.targets[0].id: node
        for node in body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.List)
    }
    loop = next((node for node in body if isinstance(node, ast.For)), None)
    if loop is None or "inputs" not in lists:
        return None
    if entry is None:
        called = {
            node.func.id
            for node in ast.walk(loop)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and any(isinstance(argument, ast.Starred) for argument in node.args)
        } - {"ref_func"}
        if len(called) != 1:
            return None
        (entry,) = called
    columns = {"enumerate(zip(inputs, results))": ("inputs", "results")}.get(
        ast.unparse(loop.iter), ("inputs",)
    )
    used = [lists[name] for name in columns]
    values = [node.value.elts for node in used if isinstance(node.value, ast.List)]
    put = _Put({"candidate": ast.Name(entry, ast.Load())})
    body_text = "\n".join(ast.unparse(put.visit(node)) for node in loop.body)
    source = [line.encode() for line in text.split("\n")]
    tests = [
        _WORD.sub(lambda m, row=row: row.get(m[0], m[0]), body_text)
        for row in (
            dict[str, str](zip(("inp", "exp"), (_text_of(v, source) for v in row), strict=False))
            for row in zip(*values, strict=True)
        )
    ]
    kept = [n for n in tree.body if n is not check]
    kept += [n for n in body if n not in kept] if check is not None else []
    setup = [node for node in kept if node is not loop and node not in used]
    for node in setup:
        _finish_assertion(node)
    program = ast.unparse(ast.Module(body=setup, type_ignores=[]))
    return entry, tuple(tests), program.replace(_NUMPY, _CLOSE, 1)


def _finish_assertion(node: ast.stmt) -> None:
    """Make the published function ``assertion`` (of Mbpp/737) assert its variable ``exact_match``.
    As published it asserts nothing, so every program would pass.
    """
    if not isinstance(node, ast.FunctionDef) or node.name != "assertion":
        return
    parts = list(ast.walk(node))
    decides = any(isinstance(part, ast.Name) and part.id == _DECISION for part in parts)
    if decides and not any(isinstance(part, (ast.Assert, ast.Raise)) for part in parts):
        node.body.append(ast.Assert(ast.Name(_DECISION, ast.Load())))


def _text_of(node: ast.expr, source: list[bytes]) -> str:
    # Equals ``ast.unparse`` and takes a hundredth of its time.
    if node.lineno != node.end_lineno:
        return f"({ast.unparse(node)})"
    text = source[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
    return text if text[:1] in ("[", "(") else f"({text})"


class _Put(ast.NodeTransformer):
    """Replaces names by expressions."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node)


def _against_reference(
    record: Mapping[str, Any], reference: str, columns: tuple[str, ...]
) -> tuple[tuple[str, ...], str]:
    """One test per input, which compares with the result of the reference, and the setup with
    it.
    """
    entry = text_field(record.get("entry_point"), "entry_point")
    atol = record.get("atol") or 0
    # One row of MBPP+ has an empty object instead of an empty list.
    given = {name: record.get(name) or [] for name in columns}
    inputs = [i for name in columns if given[name] for i in non_empty_list_field(given[name], name)]
    if not inputs:
        raise UserError(f"column {columns[-1]!r} has no input")
    tests = tuple(
        f"assert _same({entry}({(shown := _arguments(given))}), {_REFERENCE}({shown}), {atol!r})"
        for given in inputs
    )
    tree = _parse(reference, "the reference")
    renamed = _Put({entry: ast.Name(_REFERENCE, ast.Load())}).visit(tree)
    for node in renamed.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry:
            node.name = _REFERENCE
    return tests, f"{_SAME}\n{ast.unparse(renamed)}"


def _arguments(given: Any) -> str:
    return ", ".join(map(repr, non_empty_list_field(given, "an input") if given else ()))


def _problem(
    name: str, statement: str, entry: str, tests: tuple[str, ...], setup: str, reference: str
) -> Problem:
    # Refuses tests that the sandbox cannot judge. Two are enough: all tests use the same names.
    read_function_tests(
        {"test_list": list(tests[:2]), "test_setup_code": setup, "entry_point": entry}
    )
    return Problem(
        id=name,
        statement=statement,
        prompter_type="mbppplus",
        selected_uts=tests,
        entry_point=entry,
        test_setup=setup,
        reference=reference,
    )


def _parse(text: str, where: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in published strings
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"column {where!r} is not Python: {error}") from error
