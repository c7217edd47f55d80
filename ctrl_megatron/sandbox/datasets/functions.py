"""Function problems: MBPP and HumanEval as they are published, and tests given as arguments and
results. What a test may call in the program, what it may not, and what the program may see of its
setup.

A name of the tests is the program's only where nothing else can be meant: a function that is taken
for the program's gets arguments that may hold the expected result, and its answer may be the
verdict.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ctrl_megatron.problems.comparison import (
    LIVE_CODE_BENCH,
    RESULT_CHECK,
    STRICT,
)
from ctrl_megatron.problems.fields import rule_field, text_field
from ctrl_megatron.problems.input_output import PRELUDE, FunctionCalls, call_asserts
from ctrl_megatron.problems.long_integers import long_integers, require_few_digits
from ctrl_megatron.sandbox.datasets import preambles
from ctrl_megatron.sandbox.datasets.class_use import caught, is_call_of, used_as_classes
from ctrl_megatron.sandbox.datasets.marking import mark_tests
from ctrl_megatron.sandbox.datasets.problems import FunctionProblem
from ctrl_megatron.sandbox.datasets.syntax import is_vacuous, walk_code
from ctrl_megatron.sandbox.datasets.unit_tests import (
    may_hold_unit_tests,
    program_names,
    refuse_imports,
    unit_tests,
)
from ctrl_megatron.sandbox.jail.changing_calls import changing_calls
from ctrl_megatron.sandbox.jail.judge import SETUP
from ctrl_megatron.sandbox.limits import CASE_CHARACTERS

_REMEMBERED_PROBLEMS = 512
_REMEMBERED_CHARACTERS = 1 << 15
_BUILTINS = frozenset({*dir(builtins), "__name__", "__file__"})
_MODULES = frozenset(
    [
        "bisect",
        "collections",
        "copy",
        "datetime",
        "decimal",
        "fractions",
        "functools",
        "heapq",
        "itertools",
        "json",
        "math",
        "operator",
        "random",
        "re",
        "statistics",
        "string",
        "sys",
    ]
)
_HELPERS = {
    **dict.fromkeys(("ceil", "floor", "inf", "isclose", "nan", "pi", "sqrt"), "math"),
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque"), "collections"),
    "Decimal": "decimal",
    "Fraction": "fractions",
    "permutations": "itertools",
}
"""Name -> module: what published tests use without an import. It is the judge's."""
_SETUP = "provided_data.test_setup_code"
_CLASS = "Solution"
_METHOD = re.compile(rf"{_CLASS}\(\)\.([A-Za-z_]\w*)")


def read_human_eval(data: Mapping[str, Any]) -> FunctionProblem:
    """What ``human_eval_tests`` makes of a record, read as MBPP's. Raises ``ValueError``."""
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
    """Tests and their setup from ``test_list``, or ``test`` (text that defines ``check``) with
    ``entry_point``; tests may use what ``prompt`` imports and defines, all but what is to be
    written.

    A ``check`` that consists of asserts becomes one test per assert; any other stays one test, that
    calls it. Raises ``ValueError``.
    """
    entry, text, tests = data.get("entry_point"), data.get("test"), data.get("test_list")
    setup = text_field(data.get("test_setup_code") or "", "provided_data.test_setup_code")
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
    """What a prompt imports and defines for the program that follows it: without the names that
    are to be ``written``, class ``Solution``, and constants that are made of them.
    """
    names = {_CLASS, *(name for name in written if isinstance(name, str))}
    kinds = (
        *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
        *(ast.Assign, ast.AnnAssign),
    )
    kept: list[ast.stmt] = [
        node
        for node in _prompt_body(prompt)
        if isinstance(node, kinds)
        and getattr(node, "name", None) not in names
        # It would have to come first, and would reach no further than this text.
        and not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        and not (
            isinstance(node, (ast.Assign, ast.AnnAssign))
            and any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))
        )
    ]
    return ast.unparse(ast.Module(body=kept, type_ignores=[]))


def _prompt_body(prompt: str) -> list[ast.stmt]:
    """Its statements; none where it is prose."""
    # The last function, or method, may lack its body.
    for body in ("", "\n    pass", "\n        pass"):
        try:
            return ast.parse(prompt + body).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return []


def calls_problem(
    calls: FunctionCalls,
    *,
    or_first: bool,
    tolerance: tuple[float, float] = (0.0, 0.0),
) -> FunctionProblem:
    """The function, or the method of its name of a class ``Solution``, judged by ``calls``. Raises
    ``ValueError``.
    """
    name = calls.name
    tests = call_asserts(calls, or_first=or_first, tolerance=tolerance)
    read = read_function_tests(
        {"test_list": tests, "test_setup_code": RESULT_CHECK, "entry_point": name}
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


@long_integers()
def read_function_tests(data: Mapping[str, Any]) -> FunctionProblem:
    """From ``provided_data`` with ``test_list`` (a list, or its text as JSON or a Python literal),
    ``test_setup_code`` and ``entry_point`` (a name or several, or ``Solution().name`` for a
    method), as MBPP has them. Of ``prompt``, the text that the program was asked for with, the
    program gets what is Python but for what it has to define.

    Which names are calls into the program follows from the record alone, never from the program.
    With entry points these are, and class ``Solution`` where the tests call the entry point as its
    method. Otherwise it is the one function's name that the tests use and that is neither a builtin
    nor well known (``_MODULES``, ``_HELPERS``) nor defined by the setup or a test, and classes'
    names; where there is none, the one builtin's name that every test calls.

    Asserts say themselves what is equal: ``comparison`` may be LiveCodeBench's, with whose preamble
    the program then runs, and no other. Raises ``ValueError`` for a record that cannot be judged,
    such as one with a name that nothing defines.
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
    prompt = text_field(data.get("prompt") or "", "provided_data.prompt")
    given = data.get("entry_point") or ()
    if not isinstance(given, (str, list, tuple)):
        raise ValueError(
            f"provided_data.entry_point must be a function's name, got {given!r}"[:200]
        )
    entries = (given,) if isinstance(given, str) else tuple(given)
    adapter = ""
    if len(entries) == 1 and isinstance(entries[0], str) and (m := _METHOD.fullmatch(entries[0])):
        entries, adapter = (m[1],), _ADAPTER.format(name=m[1])
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
            f"provided_data.comparison {rule.name!r} does not apply to asserts, which say "
            f"themselves what is equal; {LIVE_CODE_BENCH.name!r} does, for its preamble"
        )
    preamble = preambles.LIVE_CODE_BENCH if rule is LIVE_CODE_BENCH else ""
    if not adapter and not preamble:
        return problem
    return replace(problem, adapter=adapter, prelude=f"{preamble}{problem.prelude}")


def _read(
    tests: tuple[str, ...], setup: str, entries: tuple[str, ...], prompt: str
) -> FunctionProblem:
    setup_tree = _parse(setup, _SETUP)
    trees = [_parse(t, f"provided_data.test_list[{i}]") for i, t in enumerate(tests)]
    imported = [
        program_names(tree, entries) if "import" in text else set[str]()
        for text, tree in zip([setup, *tests], [setup_tree, *trees], strict=True)
    ]
    entries = tuple(dict.fromkeys([*entries, *sorted(set[str]().union(*imported))]))
    if imported[0]:
        setup = ast.unparse(setup_tree)
    tests, trees, places, told = _one_by_one(tests, trees, imported[1:])
    for text, tree, place in zip(
        [setup, *tests], [setup_tree, *trees], [_SETUP, *places], strict=True
    ):
        if any(word in text for word in ("import", "pytest", "patch")):
            refuse_imports(tree, place)
    for tree, place in zip(trees, places, strict=True):
        if own := sorted({name for node in tree.body for name in _defines(node)} & {*entries}):
            raise ValueError(f"{place} defines {own[0]} itself, which is the program's to define")
    if entries and "candidate" in _free_names([setup_tree, *trees]) - set(entries):
        setup = f"candidate = {entries[0]}\n{setup}"
        setup_tree = _parse(setup, "provided_data.test_setup_code")
    public = _prompt_code(prompt, entries)
    if entries and _free_names([setup_tree, *trees]) & _defined(public):
        setup = f"{public}\n{setup}"
        setup_tree = _parse(setup, "provided_data.test_setup_code")
    aliases = [node for node in ast.walk(setup_tree) if isinstance(node, ast.alias)]
    imports_all = any(alias.name == "*" for alias in aliases)
    if not entries and imports_all:
        raise ValueError(
            "provided_data.test_setup_code imports *, which may hide the program's functions; "
            "give provided_data.entry_point"
        )
    free = _free_names([setup_tree, *trees])
    if entries:
        stubs = _named_stubs(entries, free, [setup_tree, *trees], imports_all)
    else:
        stubs = _inferred_stubs(free) or _shadowed_builtin(trees, setup_tree)
    helpers = "".join(_import_of(name) for name in sorted(free - stubs))
    in_place = tuple(
        i for i, tree in enumerate([setup_tree, *trees], start=SETUP) if any(changing_calls(tree))
    )
    imports = [node for node in setup_tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    defined = {node.name for node in setup_tree.body if isinstance(node, ast.ClassDef)} - stubs
    exceptions = stubs & caught([setup_tree, *trees])
    classes = used_as_classes([setup_tree, *trees], stubs) | {
        node.name for node in _prompt_body(prompt) if isinstance(node, ast.ClassDef)
    }
    marked = mark_tests(setup, setup_tree, trees, stubs)
    for index in marked.unchecked:
        raise ValueError(
            f"{places[index]} checks nothing that comes from the program: every program would "
            "pass, or none"
        )
    return FunctionProblem(
        tests=tests,
        marked=marked.tests,
        setup=_keeping(tuple(sorted(stubs)) if entries else (), f"{helpers}{marked.setup}"),
        prelude="\n".join(filter(None, (*map(ast.unparse, imports), _prompt_code(prompt, stubs)))),
        stubs=tuple(sorted(stubs - exceptions)),
        classes=tuple(sorted(classes & stubs - exceptions)),
        exceptions=tuple(sorted(exceptions)),
        shared_classes=tuple(sorted(defined)),
        in_place=in_place,
        cases=tuple({"test": text} for text in told) if told != tests else (),
    )


def _one_by_one(
    tests: tuple[str, ...], trees: list[ast.Module], imported: Sequence[set[str]]
) -> tuple[tuple[str, ...], list[ast.Module], list[str], tuple[str, ...]]:
    """Tests and their trees, where a text of unit tests gives way to one text for each of them;
    where each is from, and what to tell of it. Raises ``ValueError``.
    """
    texts, found, places, told = list[str](), list[ast.Module](), list[str](), list[str]()
    for index, (test, tree) in enumerate(zip(tests, trees, strict=True)):
        place = f"provided_data.test_list[{index}]"
        try:
            parts = unit_tests(tree) if may_hold_unit_tests(test) else []
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if parts:
            texts += [ast.unparse(part.tree) for part in parts]
            told += [part.told for part in parts]
        else:
            texts.append(ast.unparse(tree) if imported[index] else test)
            told.append(texts[-1])
        found += [part.tree for part in parts] or [tree]
        places += [place] * (len(parts) or 1)
    return tuple(texts), found, places, tuple(told)


def told_tests(data: Mapping[str, Any]) -> list[str]:
    """What to tell of each test, one for each verdict, that ``read_function_tests`` makes of
    ``test_list``, which is a list.
    """
    tests: list[str] = data["test_list"]
    # Unit tests are functions; nothing else becomes more or less than it is.
    if not any(map(may_hold_unit_tests, tests)):
        return tests
    problem = read_function_tests(data)
    return [str(case["test"]) for case in problem.cases] or tests


def _defines(node: ast.stmt) -> Iterable[str]:
    if isinstance(node, ast.Assign):
        return [t.id for t in node.targets if isinstance(t, ast.Name)]
    return () if isinstance(node, ast.ExceptHandler) else _bindings(node)


def _named_stubs(
    entries: tuple[str, ...], free: set[str], trees: Sequence[ast.Module], imports_all: bool
) -> set[str]:
    """The entry points. Raises ``ValueError`` for a name that nobody defines."""
    stubs = set(entries)
    unknown = free - stubs - _MODULES - _HELPERS.keys()
    methods = {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_call_of(node.value, {_CLASS})
    }
    if _CLASS in unknown and methods and methods <= stubs:
        stubs.add(_CLASS)
        unknown.remove(_CLASS)
    if unknown and not imports_all:
        raise ValueError(
            f"the tests use {', '.join(sorted(unknown))[:200]}, which nothing defines: define it "
            "in provided_data.test_setup_code, or name it in provided_data.entry_point if the "
            "program must"
        )
    return stubs


def _inferred_stubs(free: set[str]) -> set[str]:
    """The name that is left for the program's function where the record does not say, and those of
    its classes. Raises ``ValueError`` for more functions: one of them may be a judge.
    """
    stubs = free - _MODULES
    stubs = (stubs - _HELPERS.keys()) or stubs
    functions = sorted(name for name in stubs if not name[0].isupper())
    if len(functions) > 1:
        raise ValueError(
            f"the tests use {', '.join(functions)[:200]}, each of which may be the program's or "
            "the tests' own; give provided_data.entry_point"
        )
    return stubs


def _import_of(name: str) -> str:
    if name in _MODULES:
        return f"import {name}\n"
    return f"from {_HELPERS[name]} import {name}\n" if name in _HELPERS else ""


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
        for node in walk_code(tree):
            if isinstance(node, ast.Name):
                (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            else:
                bound.update(_bindings(node))
    return loaded - bound


def _defined(source: str) -> set[str]:
    """Functions and classes that ``source`` defines."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.parse(source).body if isinstance(node, kinds)}


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


def _shadowed_builtin(trees: list[ast.Module], setup: ast.Module) -> set[str]:
    """The one name of a builtin that every test calls: a problem may ask for such a function. Not
    what the setup defines, which would be judged in the program's place.
    """
    defined = {name for node in ast.walk(setup) for name in _bindings(node)}
    called = [
        {
            n.func.id
            for n in ast.walk(tree)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        for tree in trees
    ]
    names = set().union(*called)
    if len(names) != 1 or not all(called) or not names <= _BUILTINS - defined:
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
        if unit_tests(tree):
            return "", [text]
        check = next(
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name == "check" and node.args.args
        )
        # Without docstrings, ``assert True`` and the like.
        asserts = [
            node
            for node in check.body
            if not isinstance(node, ast.Pass)
            and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            and not (isinstance(node, ast.Assert) and is_vacuous(node.test))
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
