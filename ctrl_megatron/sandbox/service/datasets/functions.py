"""Function problems: MBPP and HumanEval as they are published, and tests given as arguments and
results. Which names of the tests are the program's, and what the program may see of their setup.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import keyword
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ctrl_megatron.sandbox.service.datasets.problems import FunctionProblem

_SHOWN = 1000
_REMEMBERED_PROBLEMS = 512
_REMEMBERED_CHARACTERS = 1 << 15
_BUILTINS = frozenset({*dir(builtins), "__name__", "__file__"})
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


def read_human_eval(data: Mapping[str, Any]) -> FunctionProblem:
    """``test_list``, or ``test`` (text that defines ``check``) with ``entry_point``.

    A ``check`` that consists of asserts becomes one test per assert; any other stays one test, that
    calls it. Raises ``ValueError``.
    """
    if data.get("test_list") or not data.get("test"):
        return read_function_tests(data)
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
    return read_function_tests(record)


def calls_problem(
    name: str, calls: Sequence[tuple[list[Any], Any]], *, or_first: bool
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
        {"input": ", ".join(map(repr, given))[:_SHOWN], "expected": repr(wanted)[:_SHOWN]}
        for given, wanted in calls
    )
    return replace(
        read,
        # What solutions take for granted must not reach the judge: it would hide the function of
        # a problem that has a library function's name.
        prelude=PRELUDE,
        adapter=_ADAPTER.format(name=name),
        cases=shown,
    )


_ADAPTER = """

if "Solution" in globals() and hasattr(globals()["Solution"], "{name}"):
    def {name}(*arguments, **named):
        return getattr(globals()["Solution"](), "{name}")(*arguments, **named)
"""


def read_function_tests(data: Mapping[str, Any]) -> FunctionProblem:
    """From ``provided_data`` with ``test_list`` (a list, or its text as JSON or a Python literal),
    ``test_setup_code`` and ``entry_point`` (a name or several), as MBPP has them.

    Which names are calls into the program follows from the record alone, never from the program:
    the entry points and every name the tests use that is neither a builtin nor defined by the setup
    or a test; where there is none, the one builtin's name that every test calls. Raises
    ``ValueError`` for a record that cannot be judged.
    """
    tests = data.get("test_list")
    if isinstance(tests, str):
        tests = _literal(tests)
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


def _read(tests: tuple[str, ...], setup: str, entries: tuple[str, ...]) -> FunctionProblem:
    setup_tree = _parse(setup, "provided_data.test_setup_code")
    trees = [_parse(t, f"provided_data.test_list[{i}]") for i, t in enumerate(tests)]
    if entries and "candidate" in _free_names([setup_tree, *trees]) - set(entries):
        setup = f"candidate = {entries[0]}\n{setup}"
        setup_tree = _parse(setup, "provided_data.test_setup_code")
    stubs = set(entries) | _free_names([setup_tree, *trees])
    aliases = (node for node in ast.walk(setup_tree) if isinstance(node, ast.alias))
    if not entries and any(alias.name == "*" for alias in aliases):
        raise ValueError(
            "provided_data.test_setup_code imports *, which may hide the program's functions; "
            "give provided_data.entry_point"
        )
    return FunctionProblem(
        tests=tests,
        setup=_keeping(entries, setup),
        prelude="\n".join(
            ast.unparse(node)
            for node in setup_tree.body
            if isinstance(node, (ast.Import, ast.ImportFrom))
        ),
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
    """The one name of a builtin that every test calls: a problem may ask for such a function."""
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
        # Without docstrings and the like.
        asserts = [
            node
            for node in check.body
            if not isinstance(node, ast.Pass)
            and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        ]
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


def _calls_check(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and getattr(call.func, "id", None) == "check"
