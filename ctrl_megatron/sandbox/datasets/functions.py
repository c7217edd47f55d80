"""Reads function problems: MBPP and HumanEval as they are published, and tests that are given as
arguments and results. ``names`` decides which names the program defines; this file decides what the
program sees of the setup and of the prompt. The tests themselves are not read but run.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ctrl_megatron.problems import preambles
from ctrl_megatron.problems.comparison import LIVE_CODE_BENCH, RESULT_CHECK, STRICT
from ctrl_megatron.problems.fields import rule_field, text_field
from ctrl_megatron.problems.input_output import FunctionCalls, asserts_for_calls
from ctrl_megatron.problems.long_integers import (
    allow_long_integers,
    load_long_integer_json,
    require_few_digits,
)
from ctrl_megatron.sandbox.datasets.names import (
    SOLUTION_CLASS,
    asserts_constants,
    find_program_names,
    free_names,
    helper_imports,
    names_defined_by,
    program_imports,
    refuse_imports,
)
from ctrl_megatron.sandbox.datasets.problems import FunctionProblem
from ctrl_megatron.sandbox.jail.judge import UNIT_TESTS
from ctrl_megatron.sandbox.limits import CASE_CHARACTERS

_REMEMBERED_PROBLEMS = 512
_REMEMBERED_CHARACTERS = 1 << 15
_SETUP = "provided_data.test_setup_code"
_METHOD = re.compile(rf"{SOLUTION_CLASS}\(\)\.([A-Za-z_]\w*)")


def read_human_eval(data: Mapping[str, Any]) -> FunctionProblem:
    """Read a record of HumanEval. Raises ``ValueError``."""
    tests, setup = human_eval_tests(data)
    return read_function_tests(
        {
            "test_list": tests,
            "test_setup_code": setup,
            "entry_point": data.get("entry_point"),
            "prompt": data.get("prompt"),
            "comparison": data.get("comparison"),
        }
    )


def human_eval_tests(data: Mapping[str, Any]) -> tuple[Any, str]:
    """Tests and setup from ``test_list``, or from ``test`` (Python text that defines ``check``)
    with ``entry_point``. Tests may use what ``prompt`` imports and defines, except for the entry
    point.

    A ``check`` that consists of asserts becomes one test per assert; any other ``check`` becomes
    one test that calls it. Raises ``ValueError``.
    """
    entry, text, tests = data.get("entry_point"), data.get("test"), data.get("test_list")
    setup = text_field(data.get("test_setup_code") or "", _SETUP)
    around = ""
    if text and not tests:
        method = _METHOD.fullmatch(entry) if isinstance(entry, str) else None
        name = method[1] if method else entry
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(
                "provided_data.test needs provided_data.entry_point, a function's name"
            )
        if not isinstance(text, str):
            raise ValueError("provided_data.test must be text that defines check(candidate)")
        around, tests = _split_check(text, name)
    prompt = text_field(data.get("prompt") or "", "provided_data.prompt")
    public = _prompt_code(prompt, entry if isinstance(entry, list) else [entry])
    return tests, "\n".join(filter(None, (public, setup, around)))


def _prompt_code(prompt: str, written: Iterable[Any]) -> str:
    """The imports and definitions of a prompt, without those that the answer has to write: the
    names ``written``, class ``Solution``, and constants that are computed from them.
    """
    names = {SOLUTION_CLASS, *(name for name in written if isinstance(name, str))}
    kinds = (
        *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
        *(ast.Assign, ast.AnnAssign),
    )
    kept: list[ast.stmt] = [
        node
        for node in _prompt_body(prompt)
        if isinstance(node, kinds)
        and getattr(node, "name", None) not in names
        # A __future__ import must be the first statement, and would affect this text only.
        and not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        and not (
            isinstance(node, (ast.Assign, ast.AnnAssign))
            and any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))
        )
    ]
    return ast.unparse(ast.Module(body=kept, type_ignores=[]))


def _prompt_body(prompt: str) -> list[ast.stmt]:
    """The statements of a prompt; empty if it is prose."""
    # The last function or method may have no body.
    for body in ("", "\n    pass", "\n        pass"):
        try:
            return ast.parse(prompt + body).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return []


def calls_problem(
    calls: FunctionCalls, *, or_first: bool, tolerance: tuple[float, float] = (0.0, 0.0)
) -> FunctionProblem:
    """A problem that calls a function, or the method of its name of class ``Solution``; its tests
    are those of ``asserts_for_calls``. Raises ``ValueError``.
    """
    tests = asserts_for_calls(calls, or_first=or_first, tolerance=tolerance)
    read = read_function_tests(
        {"test_list": tests, "test_setup_code": RESULT_CHECK, "entry_point": calls.name}
    )
    shown = tuple(
        {
            "input": ", ".join(map(repr, given))[:CASE_CHARACTERS],
            "expected": repr(wanted)[:CASE_CHARACTERS],
        }
        for given, wanted in calls.pairs
    )
    return replace(
        read,
        # Only the program gets the prelude: in the judge it would hide a problem's function that
        # has the name of a library function.
        prelude=preambles.FUNCTIONS,
        cases=shown,
    )


_ADAPTER = """

if "Solution" in globals() and hasattr(globals()["Solution"], "{name}"):
    def {name}(*arguments, **named):
        return getattr(globals()["Solution"](), "{name}")(*arguments, **named)
"""


@allow_long_integers()
def read_function_tests(data: Mapping[str, Any]) -> FunctionProblem:
    """Read ``provided_data`` with ``test_list`` (a list, or its text as JSON or a Python literal),
    ``test_setup_code`` and ``entry_point`` (one name, several, or ``Solution().name`` for a
    method), as MBPP has them. With ``RESULT_CHECK`` in the setup (``asserts_for_calls``) the
    program may define the name as a function or as a method of ``Solution``. Of ``prompt``, the
    text of the task, the program gets the part that is Python, without the names that it has to
    define itself.

    ``comparison`` may name LiveCodeBench's rule, which adds that benchmark's preamble; asserts
    compare for themselves, so no other rule applies. Raises ``ValueError`` for a record that cannot
    be judged, for example one with a name that nothing defines.
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
        raise ValueError(f"{_SETUP} must be a string")
    prompt = text_field(data.get("prompt") or "", "provided_data.prompt")
    given = data.get("entry_point") or ()
    if not isinstance(given, (str, list, tuple)):
        raise ValueError(
            f"provided_data.entry_point must be a function's name, got {given!r}"[:200]
        )
    entries = (given,) if isinstance(given, str) else tuple(given)
    adapter = ""
    if len(entries) == 1 and isinstance(entries[0], str):
        method = _METHOD.fullmatch(entries[0])
        entries = (method[1] if method else entries[0],)
        # Judges of sets with arguments and results call the method where an answer has the class.
        if method or RESULT_CHECK in setup:
            adapter = _ADAPTER.format(name=entries[0])
    if not all(isinstance(name, str) and name.isidentifier() for name in entries):
        raise ValueError(
            f"provided_data.entry_point must be a function's name, got {given!r}"[:200]
        )
    small = len(setup) + len(prompt) + sum(map(len, tests)) <= _REMEMBERED_CHARACTERS
    if not small:
        require_few_digits("\n".join((setup, prompt, *tests)), "provided_data")
    problem = (_read_once if small else _read)(tuple(tests), setup, entries, prompt)
    rule = rule_field(data, STRICT)
    if rule not in (STRICT, LIVE_CODE_BENCH):
        raise ValueError(
            f"provided_data.comparison {rule.name!r} does not apply to asserts, which "
            f"compare for themselves; {LIVE_CODE_BENCH.name!r} does, for its preamble"
        )
    preamble = preambles.LIVE_CODE_BENCH if rule is LIVE_CODE_BENCH else ""
    uncounted = data.get("uncounted") or ()
    if not all(type(place) is int and place >= 0 for place in uncounted):
        raise ValueError("provided_data.uncounted must be a list of places, from 0")
    if not adapter and not preamble and not uncounted:
        return problem
    return replace(
        problem,
        adapter=adapter,
        prelude=f"{preamble}{problem.prelude}",
        uncounted=tuple(sorted(set(uncounted))),
    )


def _read(
    tests: tuple[str, ...], setup: str, entries: tuple[str, ...], prompt: str
) -> FunctionProblem:
    setup_tree = _parse(setup, _SETUP)
    trees = [_parse(t, f"provided_data.test_list[{i}]") for i, t in enumerate(tests)]
    places = [f"provided_data.test_list[{i}]" for i in range(len(tests))]
    importing = [
        tree
        for text, tree in zip([setup, *tests], [setup_tree, *trees], strict=True)
        if "import" in text
    ]
    modules, imported = program_imports(importing, entries)
    entries = tuple(dict.fromkeys([*entries, *sorted(imported)]))
    for text, tree, place in zip(
        [setup, *tests], [setup_tree, *trees], [_SETUP, *places], strict=True
    ):
        if "import" in text or "pytest" in text:
            refuse_imports(tree, modules, place)
    for tree, place in zip(trees, places, strict=True):
        if own := sorted(
            {name for node in tree.body for name in names_defined_by(node)} & {*entries}
        ):
            raise ValueError(f"{place} defines {own[0]} itself, which is the program's to define")
    if entries and "candidate" in free_names([setup_tree, *trees]) - set(entries):
        setup = f"candidate = {entries[0]}\n{setup}"
        setup_tree = _parse(setup, _SETUP)
    public = _prompt_code(prompt, entries)
    if entries and free_names([setup_tree, *trees]) & _defined(public):
        setup = f"{public}\n{setup}"
        setup_tree = _parse(setup, _SETUP)
    stubs = find_program_names(entries, setup_tree, trees)
    if "assert" not in setup and "raise" not in setup and all(map(asserts_constants, tests, trees)):
        raise ValueError("no test checks the program: all assert constants only")
    helpers = helper_imports(free_names([setup_tree, *trees]) - stubs)
    imports = [
        node
        for node in setup_tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and not (isinstance(node, ast.ImportFrom) and (node.level or node.module in modules))
        and not any(alias.name in modules for alias in node.names)
    ]
    defined = {node.name for node in setup_tree.body if isinstance(node, ast.ClassDef)} - stubs
    return FunctionProblem(
        tests=tests,
        setup=_keeping(tuple(sorted(stubs)) if entries else (), f"{helpers}{setup}"),
        prelude="\n".join(filter(None, (*map(ast.unparse, imports), _prompt_code(prompt, stubs)))),
        stubs=tuple(sorted(stubs)),
        modules=tuple(sorted(modules)),
        classes=tuple(sorted(defined)),
    )


# All samples of a group send the same problem.
_read_once = functools.lru_cache(_REMEMBERED_PROBLEMS)(_read)


def _keeping(entries: tuple[str, ...], setup: str) -> str:
    """``setup``, followed by statements that restore the entry points: if the setup imports or
    defines one of them, the tests must still judge the program's.
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


def _defined(source: str) -> set[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.parse(source).body if isinstance(node, kinds)}


def _literal(text: str) -> Any:
    for read in (load_long_integer_json, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    raise ValueError("provided_data.test_list is neither a list nor the text of one")


def _split_check(text: str, entry: str) -> tuple[str, list[str]]:
    """The code around ``check``, and the tests. Raises ``ValueError``."""
    try:
        tree = ast.parse(text)
        check = next(
            (
                node
                for node in tree.body
                if isinstance(node, ast.FunctionDef) and node.name == "check" and node.args.args
            ),
            None,
        )
        if check is None:
            if UNIT_TESTS in text:
                return "", [text]
            raise ValueError("provided_data.test defines no function check(candidate)")
        # Docstrings and the like are no tests.
        asserts = [
            node
            for node in check.body
            if not isinstance(node, ast.Pass)
            and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            and not (isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant))
        ]
        if not asserts or not all(isinstance(node, ast.Assert) for node in asserts):
            called = any(map(_calls_check, tree.body))
            return "", [text if called else f"{text}\n\ncheck({entry})\n"]
        rest = [node for node in tree.body if node is not check and not _calls_check(node)]
        around = ast.unparse(ast.Module(body=rest, type_ignores=[]))
        parameter = check.args.args[0].arg
        bound = "" if parameter == entry else f"{parameter} = {entry}\n"
        return f"{bound}{around}", [ast.unparse(node) for node in asserts]
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"provided_data.test is not valid Python: {error}") from error


def _calls_check(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and getattr(call.func, "id", None) == "check"
