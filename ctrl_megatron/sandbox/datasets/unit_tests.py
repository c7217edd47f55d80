"""Splits tests in the form of pytest and unittest into one program text per test."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from ctrl_megatron.sandbox.datasets.syntax import (
    FUNCTIONS,
    Function,
    bound_in,
    dotted,
    is_main_guard,
    last_name,
)

_LEFT_OUT = frozenset(["expectedFailure", "skip", "skipIf", "skipUnless", "skipif", "xfail"])
MOST_TESTS = 1000
MOST_CHARACTERS = 2 << 20
"""Limits of the tests of one text, each with the code around it."""
_RUNNERS = frozenset(
    ["TestLoader", "TestSuite", "TextTestRunner", "defaultTestLoader", "makeSuite"]
)
_MAINS = ("pytest.main", "unittest.main")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Method:
    """A test method of a class."""

    of: ast.ClassDef
    function: Function
    unittest: bool


def may_hold_unit_tests(text: str) -> bool:
    """Whether the text may contain unit tests; a quick check."""
    return "def test" in text


class UnitTest(NamedTuple):
    """A single test with all code that it needs, and the text to report for it."""

    tree: ast.Module
    reported: str


def unit_tests(tree: ast.Module) -> list[UnitTest]:
    """One text for each test function or method of ``tree`` that no other code in it calls,
    together with all other code but the other tests; empty if there is no such test. A literal list
    of parameters gives one test each. Raises ``ValueError`` for tests that cannot be run: fixtures,
    coroutines.
    """
    guards = [n for n in tree.body if isinstance(n, ast.If) and is_main_guard(n.test)]
    body = _without_runners(node for node in tree.body if node not in guards)
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    called = _reached_names(body)
    functions = [n for n in _defined_in(body) if n.name.startswith("test") and n.name not in called]
    cases = [
        n for n in classes.values() if n.name not in called and _is_case(n, classes) is not None
    ]
    found = [*functions, *cases]
    if not found:
        return []
    functions = [n for n in functions if not _is_left_out(n.decorator_list)]
    cases = [n for n in cases if not _is_left_out(n.decorator_list)]
    _refuse_fixtures_for_all(body)
    tests = _Tests()
    for function in functions:
        before = _if_defined(body, ("setup_module", "setUpModule", "setup_function"))
        context = [*_around(body, found, function), *before]
        calls = _calls(ast.Name(function.name, ast.Load()), function, (), 0)
        tests.add(context, function, ([call] for call in calls))
    for case in cases:
        before = _if_defined(body, ("setup_module", "setUpModule"))
        for method in _methods(case, classes):
            context = [*_around(body, found, case, method), *before]
            tests.add(context, method.function, _runs(method, classes))
    if not tests.texts:
        raise ValueError("every test in it is skipped or expected to fail")
    return [UnitTest(ast.parse(text), reported) for text, reported in tests.texts]


def _defined_in(body: Iterable[ast.stmt]) -> list[Function]:
    return [node for node in body if isinstance(node, FUNCTIONS)]


class _Tests:
    """The texts of single tests and the texts to report, limited in number and size."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, str]] = []
        self._characters = 0

    def add(
        self, context: list[ast.stmt], function: Function, runs: Iterable[list[ast.stmt]]
    ) -> None:
        """Add one test for each of ``runs``: ``context``, which defines ``function``, followed by
        the run. Raises ``ValueError``.
        """
        around, reported = _source(context), _source([_undecorated(function)])
        for run in runs:
            call = _source(run)
            self.texts.append((f"{around}\n{call}", f"{reported}\n{call}"))
            self._characters += len(self.texts[-1][0])
            if len(self.texts) > MOST_TESTS:
                raise ValueError(f"it contains more than {MOST_TESTS} tests")
            if self._characters > MOST_CHARACTERS:
                raise ValueError(
                    f"its tests, each with the code around it, have more than {MOST_CHARACTERS} "
                    "characters"
                )


def _source(body: list[ast.stmt]) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Module(body=body, type_ignores=[])))


def _is_case(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> str | None:
    """``unittest`` or ``pytest`` for a class with tests of that framework; None for any other
    class.
    """
    family = list(_family(node, classes))
    tests = (f for one in family for f in _defined_in(one.body) if f.name.startswith("test"))
    if next(tests, None) is None:
        return None
    bases = {last_name(base) for one in family for base in one.bases}
    if bases & {"TestCase", "IsolatedAsyncioTestCase"}:
        return "unittest"
    return "pytest" if node.name.startswith("Test") else None


def _methods(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[_Method]:
    """The tests of a class, inherited ones included."""
    unittest, seen = _is_case(node, classes) == "unittest", set[str]()
    for one in _family(node, classes):
        for function in _defined_in(one.body):
            if function.name.startswith("test") and function.name not in seen:
                seen.add(function.name)
                if not _is_left_out(function.decorator_list):
                    yield _Method(of=node, function=function, unittest=unittest)


def _family(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    yield node
    for base in node.bases:
        parent = classes.get(last_name(base) or "")
        if parent is not None and parent is not node:
            yield from _family(parent, classes)


def _around(
    body: Sequence[ast.stmt],
    tests: Sequence[ast.stmt],
    own: ast.stmt,
    method: _Method | None = None,
) -> list[ast.stmt]:
    """``body`` without the tests that ``own`` does not use, and without the other tests of its
    class.
    """
    needed, new = set[str](), {getattr(own, "name", "")}
    by_name = {getattr(node, "name", ""): node for node in tests}
    while new:
        needed |= new
        new = _names_in(by_name[name] for name in new if name in by_name) - needed
    kept = [n for n in body if n not in tests or getattr(n, "name", "") in needed]
    if method is None:
        return [_undecorated(node) if node is own else node for node in kept]
    used = _names_in([method.function])
    return [
        _only(node, method.function, used)
        if isinstance(node, ast.ClassDef) and node is own
        else node
        for node in kept
    ]


def _only(node: ast.ClassDef, test: Function, used: Container[str]) -> ast.ClassDef:
    body = [
        _undecorated(part) if part is test else part
        for part in node.body
        if part is test
        or not isinstance(part, FUNCTIONS)
        or not part.name.startswith("test")
        or part.name in used
    ]
    return ast.ClassDef(
        name=node.name, bases=node.bases, keywords=node.keywords, body=body, decorator_list=[]
    )


def _undecorated(node: ast.stmt) -> ast.stmt:
    """A function without its pytest marks; any other statement unchanged."""
    if not isinstance(node, FUNCTIONS):
        return node
    kept = [d for d in node.decorator_list if "mark" not in _names_in([d])]
    return type(node)(
        name=node.name, args=node.args, body=node.body, decorator_list=kept, returns=node.returns
    )


def _runs(method: _Method, classes: dict[str, ast.ClassDef]) -> Iterator[list[ast.stmt]]:
    """For each case of a test method the statements that run it."""
    name, function = method.of.name, method.function
    defined = {
        part.name: part
        for one in reversed(list(_family(method.of, classes)))
        for part in one.body
        if isinstance(part, FUNCTIONS)
    }
    if method.unittest:
        _refuse(function, parameters=_parameters(function)[1:])
        before = [_statement(f"{name}.setUpClass()")] if "setUpClass" in defined else []
        yield [*before, _statement(f"{name}({function.name!r}).debug()")]
        return
    before = [_statement(f"_tests = {name}()")]
    for each in ("setup_class", "setup_method", "setup"):
        if each in defined:
            given = len(_parameters(defined[each])) - (not _is_static(defined[each]))
            before.append(_statement(f"_tests.{each}({', '.join(['None'] * given)})"))
    target = ast.Attribute(ast.Name("_tests", ast.Load()), function.name, ast.Load())
    bound = 0 if _is_static(function) else 1
    for call in _calls(target, function, method.of.decorator_list, bound):
        yield [*before, call]


def _is_static(function: Function) -> bool:
    return any(last_name(d) == "staticmethod" for d in function.decorator_list)


def _calls(
    target: ast.expr, function: Function, of_class: Sequence[ast.expr], bound: int
) -> Iterator[ast.stmt]:
    """Calls of a test: one for each set of parameters that is written out."""
    marks = [mark for mark in (*of_class, *function.decorator_list) if _is_parametrize(mark)]
    sets = [_cases(mark, number, function.name) for number, mark in enumerate(marks)]
    given = {name for mark in marks for name in _parameter_names(mark)}
    _refuse(function, parameters=[p for p in _parameters(function)[bound:] if p not in given])
    for cases in itertools.product(*sets):
        keywords = [keyword for case in cases for keyword in case.keywords]
        call: ast.stmt = ast.Expr(ast.Call(target, [], keywords))
        for case in cases:
            if case.loop is not None:
                call = ast.For(case.loop[0], case.loop[1], [call], [])
        yield call


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One set of parameters, or a loop over sets that are computed at run time."""

    keywords: list[ast.keyword]
    loop: tuple[ast.Name, ast.expr] | None = None


def _is_parametrize(mark: ast.expr) -> TypeGuard[ast.Call]:
    return isinstance(mark, ast.Call) and last_name(mark.func) == "parametrize"


def _parameter_names(mark: ast.Call) -> list[str]:
    by_name = [k.value for k in mark.keywords if k.arg == "argnames"]
    names = mark.args[0] if mark.args else by_name[0] if by_name else None
    if isinstance(names, ast.Constant) and isinstance(names.value, str):
        return [name.strip() for name in names.value.split(",") if name.strip()]
    if isinstance(names, (ast.List, ast.Tuple)):
        return [str(name.value) for name in names.elts if isinstance(name, ast.Constant)]
    return []


def _cases(mark: ast.Call, number: int, test: str) -> list[_Case]:
    names = _parameter_names(mark)
    by_name = [k.value for k in mark.keywords if k.arg == "argvalues"]
    values = mark.args[1] if len(mark.args) > 1 else by_name[0] if by_name else None
    if not names or values is None:
        raise ValueError(f"the parameters of {test} cannot be read")
    written_out = isinstance(values, (ast.List, ast.Tuple)) and not any(
        isinstance(part, ast.Starred) for value in values.elts for part in (value, *_given(value))
    )
    if not written_out:
        item = f"_values{number}"
        loop = ast.Name(item, ast.Store()), values
        return [_Case(keywords=_spread(names, ast.Name(item, ast.Load())), loop=loop)]
    cases = []
    for value in values.elts if isinstance(values, (ast.List, ast.Tuple)) else ():
        if isinstance(value, ast.Call) and last_name(value.func) == "param":
            if _is_left_out([k.value for k in value.keywords]):
                continue
            value = value.args[0] if len(names) == 1 else ast.Tuple(value.args, ast.Load())
        cases.append(_Case(keywords=_spread(names, value)))
    return cases


def _given(value: ast.expr) -> list[ast.expr]:
    return value.args if isinstance(value, ast.Call) else []


def _spread(names: list[str], value: ast.expr) -> list[ast.keyword]:
    if len(names) == 1:
        return [ast.keyword(names[0], value)]
    if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(names):
        return [ast.keyword(name, item) for name, item in zip(names, value.elts, strict=True)]
    pairs = ast.Call(ast.Name("zip", ast.Load()), [_expression(repr(names)), value], [])
    return [ast.keyword(None, ast.Call(ast.Name("dict", ast.Load()), [pairs], []))]


def _refuse(function: Function, *, parameters: list[str]) -> None:
    if isinstance(function, ast.AsyncFunctionDef):
        raise ValueError(f"{function.name} is a coroutine, which the judge does not run")
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and last_name(mark.func) == "usefixtures":
            parameters = [*parameters, *(str(getattr(a, "value", "")) for a in mark.args)]
    if parameters:
        raise ValueError(
            f"{function.name} uses the fixture {parameters[0]!r}: the judge runs tests without "
            "fixtures; make what it needs in the test itself"
        )


def _refuse_fixtures_for_all(body: Iterable[ast.stmt]) -> None:
    for node in _defined_in(body):
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and any(k.arg == "autouse" for k in mark.keywords):
                raise ValueError(
                    f"the fixture {node.name!r} applies to every test: the judge runs tests "
                    "without fixtures; make what they need in the tests themselves"
                )


def _parameters(function: Function) -> list[str]:
    """Names of the parameters without a default."""
    of = function.args
    positional = [a.arg for a in (*of.posonlyargs, *of.args)]
    required = positional[: len(positional) - len(of.defaults)]
    named = zip(of.kwonlyargs, of.kw_defaults, strict=True)
    return required + [a.arg for a, default in named if default is None]


def _is_left_out(marks: Iterable[ast.expr]) -> bool:
    names = (last_name(mark.func if isinstance(mark, ast.Call) else mark) for mark in marks)
    return any(name in _LEFT_OUT for name in names)


def _without_runners(body: Iterable[ast.stmt]) -> list[ast.stmt]:
    """``body`` without the statements that pass tests to a runner, and without those that use their
    results.
    """
    kept, dropped, mains = list[ast.stmt](), set[str](), set(_MAINS)
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module in ("pytest", "unittest"):
            mains |= {alias.asname or "main" for alias in node.names if alias.name == "main"}
        defines = isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom))
        names = set() if defines else _names_in([node])
        runs = names & (_RUNNERS | dropped) or any(dotted(p) in mains for p in ast.walk(node))
        if runs and not defines:
            dropped |= bound_in([node])
        else:
            kept.append(node)
    return kept


def _reached_names(body: Sequence[ast.stmt]) -> set[str]:
    """Names that the text uses when it runs, including those in functions that it calls."""
    defined = {n.name: n for n in body if isinstance(n, (*FUNCTIONS, ast.ClassDef))}
    reached, new = set[str](), _names_in(n for n in body if n not in defined.values())
    while new:
        reached |= new
        new = _names_in(defined[name] for name in new if name in defined) - reached
    return reached


def _if_defined(body: Iterable[ast.stmt], names: Sequence[str]) -> list[ast.stmt]:
    defined = [n for n in body if isinstance(n, FUNCTIONS) and n.name in names]
    return [_statement(f"{n.name}({', '.join(['None'] * len(_parameters(n)))})") for n in defined]


# --- small parts ---------------------------------------------------------------------------------


def _names_in(nodes: Iterable[ast.AST]) -> set[str]:
    parts = (part for node in nodes for part in ast.walk(node))
    return {
        part.id if isinstance(part, ast.Name) else part.attr
        for part in parts
        if isinstance(part, (ast.Name, ast.Attribute))
    }


def _statement(text: str) -> ast.stmt:
    return ast.parse(text).body[0]


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
