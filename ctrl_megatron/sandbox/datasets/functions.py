"""Function problems: MBPP and HumanEval as they are published, and tests given as arguments and
results.
"""

from __future__ import annotations

import ast
import json
import keyword
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ctrl_megatron.sandbox.datasets.problems import FunctionProblem
from ctrl_megatron.sandbox.function_tests import read_function_tests

_SHOWN = 1000
_COMPARE = """
from builtins import dict as _dict, list as _list, tuple as _tuple, type as _type
from math import inf, nan
def _plain(value):
    kind = _type(value)
    if kind is _list or kind is _tuple:
        return [_plain(item) for item in value]
    if kind is _dict:
        return {key: _plain(item) for key, item in value.items()}
    return value
def _check(got, wanted, or_first):
    got, wanted = _plain(got), _plain(wanted)
    if or_first and _type(wanted) is _list and wanted and got == wanted[0]:
        return
    assert got == wanted
"""
_OWN_NAMES = ("_check", "_plain", "_dict", "_list", "_tuple", "_type", "inf", "nan")
_IMPORTED = "typing collections heapq bisect itertools functools operator string math random"
PRELUDE = "".join(
    [
        *(f"from {name} import *\n" for name in _IMPORTED.split()),
        "import bisect, collections, copy, datetime, functools, heapq, itertools, json, math\n",
        "import operator, os, random, re, statistics, string, sys, time, typing\n",
        "from builtins import *\nfrom typing import List, Optional, Tuple, Dict, Set\n",
    ]
)
"""Imports that published solutions of function problems take for granted."""


def read_mbpp(data: Mapping[str, Any]) -> FunctionProblem:
    """``test_list`` (a list, or its text as JSON or a Python literal), ``test_setup_code`` and
    ``entry_point``. Raises ``ValueError``.
    """
    tests = data.get("test_list")
    record = {**data, "test_list": _literal(tests) if isinstance(tests, str) else tests}
    return FunctionProblem(tests=read_function_tests(record))


def read_human_eval(data: Mapping[str, Any]) -> FunctionProblem:
    """``test_list``, or ``test`` (text that defines ``check``) with ``entry_point``.

    A ``check`` that consists of asserts becomes one test per assert; any other stays one test, that
    calls it. Raises ``ValueError``.
    """
    if data.get("test_list") or not data.get("test"):
        return read_mbpp(data)
    entry, text = data.get("entry_point"), data["test"]
    if not isinstance(entry, str) or not entry.isidentifier():
        raise ValueError("provided_data.test needs provided_data.entry_point, a function's name")
    if not isinstance(text, str):
        raise ValueError("provided_data.test must be text that defines check(candidate)")
    setup = data.get("test_setup_code") or ""
    if not isinstance(setup, str):
        raise ValueError("provided_data.test_setup_code must be text")
    around, tests = _split_check(text, entry)
    record = {"test_list": tests, "entry_point": entry, "test_setup_code": f"{setup}\n{around}"}
    return FunctionProblem(tests=read_function_tests(record))


def calls_problem(
    name: str,
    calls: Sequence[tuple[list[Any], Any]],
    *,
    or_first: bool = False,
    single: bool = False,
    seconds: float | None = None,
) -> FunctionProblem:
    """Function ``name``, or the method of that name of a class ``Solution``, called with arguments
    and compared with a result; tuples count as lists.

    With ``or_first`` a result that is a list may also hold the accepted value as its first item, as
    APPS and TACO write it. Raises ``ValueError``.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name in _OWN_NAMES:
        raise ValueError(f"fn_name must be a function's name, got {name[:100]!r}")
    tests = [
        f"_check({name}({', '.join(map(repr, given))}), {wanted!r}, {or_first})"
        for given, wanted in calls
    ]
    read = read_function_tests(
        {"test_list": tests, "test_setup_code": _COMPARE, "entry_point": name}
    )
    shown = tuple(
        {
            "input": ", ".join(map(repr, given))[:_SHOWN],
            "expected": repr(wanted)[:_SHOWN],
        }
        for given, wanted in calls
    )
    return FunctionProblem(
        # What solutions take for granted must not reach the judge: it would hide the function of
        # a problem that has a library function's name.
        tests=replace(read, prelude=PRELUDE),
        adapter=_ADAPTER.format(name=name),
        cases=shown,
        single=single,
        seconds=seconds,
    )


_ADAPTER = """

if "Solution" in globals() and hasattr(globals()["Solution"], "{name}"):
    def {name}(*arguments, **named):
        return getattr(globals()["Solution"](), "{name}")(*arguments, **named)
"""


def _literal(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    raise ValueError("provided_data.test_list is neither a list nor the text of one")


def _split_check(text: str, entry: str) -> tuple[str, list[str]]:
    """What stands around ``check``, and the tests. Raises ``ValueError``."""
    try:
        tree = ast.parse(text)
        check = next(
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name == "check" and node.args.args
        )
        asserts = [node for node in check.body if not _says_nothing(node)]
        if not asserts or not all(isinstance(node, ast.Assert) for node in asserts):
            called = any(map(_calls_check, tree.body))
            return "", [text if called else f"{text}\n\ncheck({entry})\n"]
        rest = [node for node in tree.body if node is not check and not _calls_check(node)]
        around = ast.unparse(ast.Module(body=rest, type_ignores=[]))
        parameter = check.args.args[0].arg
        bound = "" if parameter == entry else f"{parameter} = {entry}\n"
        return f"{bound}{around}", [ast.unparse(node) for node in asserts]
    except StopIteration:
        raise ValueError("provided_data.test defines no function check(candidate)") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"provided_data.test is not valid Python: {error}") from error


def _says_nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def _calls_check(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "check"
    )
