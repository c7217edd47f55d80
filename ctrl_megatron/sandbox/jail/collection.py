"""Finds the unit tests of a text that was executed, and runs them as unittest and pytest do:
functions ``test...``, test cases of unittest, and classes ``Test...``.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ctrl_megatron.sandbox.jail.failures import TestsRefused
from ctrl_megatron.sandbox.jail.pytest_stand_in import (
    BUILTIN_FIXTURES,
    FIXTURE,
    MARKS,
    Fixture,
    Mark,
    Parameters,
    Request,
)

MOST_TESTS = 1000
_PER_TEST = "function"


@dataclass(frozen=True)
class UnitTest:
    """A single test: its name with its parameters, its source, and how to run it."""

    name: str
    source: str
    run: Callable[[], None]


def collect_tests(
    namespace: dict[str, Any], text: str, known: set[str], ended: contextlib.ExitStack
) -> list[UnitTest]:
    """The tests that ``text`` defined in ``namespace``, in their order; empty if there are none.
    ``known`` are the names that were there before; ``ended`` is closed after the last test. Raises
    ``TestsRefused``.
    """
    lines = text.splitlines(keepends=True)
    module = _Module(namespace, ended)
    found: list[UnitTest] = []
    some = False
    for name, value in [*namespace.items()]:
        if name in known or name.startswith("_"):
            continue
        if name.startswith("test") and isinstance(value, types.FunctionType):
            some = True
            found += _of_function(module, None, name, value, lines)
        elif isinstance(value, type) and value.__module__ == "tests":
            cases = _of_class(module, name, value, lines)
            some |= cases is not None
            found += cases or ()
        if len(found) > MOST_TESTS:
            raise TestsRefused(f"the text contains more than {MOST_TESTS} tests")
    if some and not found:
        raise TestsRefused("every test of the text is skipped or expected to fail")
    return found


@dataclass
class _Module:
    """The text's namespace, what is set up once for all its tests, and fixtures of wide scope."""

    namespace: dict[str, Any]
    ended: contextlib.ExitStack
    is_set_up: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    classes: set[Any] = field(default_factory=set)

    def set_up(self) -> None:
        if not self.is_set_up:
            self.is_set_up = True
            for name in ("setUpModule", "setup_module"):
                if name in self.namespace:
                    _call_with(self.namespace[name], None)
            for name in ("tearDownModule", "teardown_module"):
                if name in self.namespace:
                    self.ended.callback(_call_with, self.namespace[name], None)

    def fixtures(self, kind: Any) -> dict[str, Fixture]:
        holders = [vars(one) for one in reversed(kind.__mro__)] if kind else []
        found = dict(BUILTIN_FIXTURES)
        for holder in (self.namespace, *holders):
            for value in holder.values():
                if type(value) is not types.FunctionType:
                    continue
                declared = vars(value).get(FIXTURE)
                if isinstance(declared, Fixture):
                    found[declared.name] = declared
        return found


def _of_class(module: _Module, name: str, kind: Any, lines: list[str]) -> list[UnitTest] | None:
    """The tests of a class; None for one that holds none."""
    unittest = sys.modules.get("unittest")
    if unittest is not None and issubclass(kind, unittest.TestCase):
        return _of_case(module, kind, lines)
    if not name.startswith("Test"):
        return None
    methods = _methods(kind)
    if not methods:
        return None
    return [
        test
        for method, function in methods.items()
        for test in _of_function(module, kind, method, function, lines)
    ]


def _methods(kind: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in reversed(kind.__mro__):
        for name, value in vars(one).items():
            if name.startswith("test") and callable(getattr(kind, name)):
                found[name] = value
    return found


def _of_case(module: _Module, kind: Any, lines: list[str]) -> list[UnitTest] | None:
    methods = _methods(kind)
    if not methods:
        return None
    if _is_left_out(kind):
        return []

    def run(name: str) -> Callable[[], None]:
        def once() -> None:
            module.set_up()
            if kind not in module.classes:
                module.classes.add(kind)
                module.ended.callback(kind.doClassCleanups)
                kind.setUpClass()
                module.ended.callback(kind.tearDownClass)
            case = kind(name)
            case.debug()
            case.doCleanups()

        return once

    return [
        UnitTest(f"{kind.__name__}.{name}", _source(function, lines), run(name))
        for name, function in methods.items()
        if not _is_left_out(function)
    ]


def _of_function(
    module: _Module, kind: Any, name: str, function: Any, lines: list[str]
) -> list[UnitTest]:
    static = isinstance(function, (staticmethod, classmethod))
    plain = function.__func__ if static else function
    marks = [*getattr(kind, MARKS, ()), *getattr(plain, MARKS, ())]
    if (kind is not None and _is_left_out(kind)) or _is_left_out(plain) or _left_out(marks):
        return []
    fixtures = module.fixtures(kind)
    needed = _parameters(plain)[0 if kind is None or isinstance(function, staticmethod) else 1 :]
    sets = [_parameter_sets(mark) for mark in marks if mark.name == "parametrize"]
    varied = [one for one in _closure(needed, fixtures, marks) if fixtures[one].params is not None]
    values = [[(one, given) for given in fixtures[one].params or ()] for one in varied]
    shown = f"{kind.__name__}.{name}" if kind else name
    indirect = {one for mark in marks for one in _indirect(mark)}
    tests = []
    for chosen in itertools.product(*reversed(sets)):
        every = {k: v for named, _ in chosen for k, v in named.items()}
        given = {k: v for k, v in every.items() if k not in indirect}
        through = {k: v for k, v in every.items() if k in indirect}
        for parameters in itertools.product(*values):
            labels = [label for _, label in reversed(chosen)] + [_label(v) for _, v in parameters]
            label = f"[{'-'.join(labels)}]" if labels else ""
            run = _runner(module, kind, name, needed, given, {**dict(parameters), **through}, marks)
            source = _source(plain, lines)
            tests.append(UnitTest(f"{shown}{label}", source, run))
    return tests


def _runner(
    module: _Module,
    kind: Any,
    name: str,
    needed: list[str],
    given: dict[str, Any],
    parameters: dict[str, Any],
    marks: list[Any],
) -> Callable[[], None]:
    def run() -> None:
        module.set_up()
        instance = kind() if kind else None
        if kind is not None and kind not in module.classes:
            module.classes.add(kind)
            _call_if_there(kind, "setup_class", kind)
        target = getattr(instance, name) if kind else module.namespace[name]
        with contextlib.ExitStack() as stack:
            fixtures = _Values(module, kind, instance, target, given, parameters, stack)
            for each in ("setup_method", "setup") if kind else ():
                _call_if_there(instance, each, target)
            if not kind and "setup_function" in module.namespace:
                _call_with(module.namespace["setup_function"], target)
            for mark in marks:
                if mark.name == "usefixtures":
                    for used in mark.args:
                        fixtures.value(used)
            for declared in fixtures.declared.values():
                if declared.autouse:
                    fixtures.value(declared.name)
            arguments = {one: fixtures.value(one) for one in needed}
            try:
                _awaited(target(**arguments))
            finally:
                for each in ("teardown_method", "teardown") if kind else ():
                    _call_if_there(instance, each, target)
                if not kind and "teardown_function" in module.namespace:
                    _call_with(module.namespace["teardown_function"], target)

    return run


class _Values:
    """The values of the fixtures of one test."""

    def __init__(
        self,
        module: _Module,
        kind: Any,
        instance: Any,
        target: Any,
        given: dict[str, Any],
        parameters: dict[str, Any],
        stack: contextlib.ExitStack,
    ) -> None:
        self._module, self._instance, self._stack = module, instance, stack
        self.declared = module.fixtures(kind)
        self._values: dict[str, Any] = {}
        self._given, self._parameters = given, parameters
        self._kind, self._target = kind, target

    def value(self, name: str) -> Any:
        """The value for a parameter of this name. Raises ``TestsRefused``."""
        if name in self._given:
            return self._given[name]
        if name == "request":
            return self._request(None)
        declared = self.declared.get(name)
        if declared is None:
            raise TestsRefused(f"the judge does not have the fixture {name!r}")
        wide = declared.scope != _PER_TEST and declared.params is None
        values = self._module.values if wide else self._values
        if name not in values:
            stack = self._module.ended if wide else self._stack
            values[name] = self._made(declared, name, stack)
        return values[name]

    def _request(self, value: Any) -> Request:
        finalizers: list[Callable[[], Any]] = []
        self._stack.callback(lambda: [one() for one in reversed(finalizers)])
        return Request(
            param=value,
            function=self._target,
            cls=self._kind,
            instance=self._instance,
            node=types.SimpleNamespace(name=getattr(self._target, "__name__", "")),
            finalizers=finalizers,
            get=self.value,
        )

    def _made(self, declared: Fixture, name: str, stack: contextlib.ExitStack) -> Any:
        function: Any = declared.function
        names = _parameters(function)
        bound = bool(names) and names[0] == "self" and self._instance is not None
        arguments = {
            one: self._request(self._parameters.get(name)) if one == "request" else self.value(one)
            for one in (names[1:] if bound else names)
        }
        made = function(self._instance, **arguments) if bound else function(**arguments)
        if inspect.isgenerator(made):
            manager = contextlib.contextmanager(lambda: made)
            return stack.enter_context(manager())
        return _awaited(made)


def _awaited(result: Any) -> Any:
    """The result, after it was awaited if it is a coroutine."""
    if not inspect.iscoroutine(result):
        return result
    import asyncio  # only where a test is a coroutine: it would double the memory to fork

    return asyncio.run(result)


def _closure(names: list[str], fixtures: dict[str, Fixture], marks: list[Any]) -> list[str]:
    """The fixtures that a test needs, directly or through others."""
    used = [name for mark in marks if mark.name == "usefixtures" for name in mark.args]
    automatic = [one.name for one in fixtures.values() if one.autouse]
    left, found = [*names, *used, *automatic], list[str]()
    while left:
        name = left.pop(0)
        if name in fixtures and name not in found:
            found.append(name)
            left += _parameters(fixtures[name].function)
    return found


def _parameter_sets(mark: Mark) -> list[tuple[dict[str, Any], str]]:
    """The values of a ``parametrize``, each with its label."""
    named = dict(mark.kwargs or {})
    names = _names_of(mark)
    values = mark.args[1] if len(mark.args) > 1 else named.get("argvalues")
    if not names or values is None:
        raise TestsRefused("the parameters of a test cannot be read")
    sets = []
    ids = named.get("ids")
    for number, value in enumerate(values):
        marks: tuple[Any, ...] = ()
        label = None
        if isinstance(value, Parameters):
            value, marks, label = value.values, value.marks, value.id
            value = value[0] if len(names) == 1 else value
        if _left_out(marks):
            continue
        items = (value,) if len(names) == 1 else tuple(value)
        if len(items) != len(names):
            raise TestsRefused(f"{len(names)} parameters got {len(items)} values")
        if label is None and isinstance(ids, (list, tuple)) and number < len(ids):
            label = str(ids[number])
        label = label if label is not None else "-".join(map(_label, items))
        sets.append((dict(zip(names, items, strict=True)), label))
    return sets


def _indirect(mark: Mark) -> list[str]:
    """The parameters of a ``parametrize`` that go to a fixture of their name."""
    indirect = (mark.kwargs or {}).get("indirect", False)
    if mark.name != "parametrize" or not indirect:
        return []
    return _names_of(mark) if indirect is True else [*indirect]


def _names_of(mark: Mark) -> list[str]:
    names: Any = mark.args[0] if mark.args else (mark.kwargs or {}).get("argnames")
    if isinstance(names, str):
        return [one.strip() for one in names.split(",") if one.strip()]
    return [*(names or ())]


def _label(value: Any) -> str:
    plain = type(value) in (bool, int, float, str, type(None))
    return (repr(value) if plain else type(value).__name__)[:40]


def _left_out(marks: Any) -> bool:
    return any(
        mark.name in ("skip", "xfail")
        or (mark.name == "skipif" and bool(mark.args[:1] and mark.args[0]))
        for mark in marks
        if isinstance(mark, Mark)
    )


def _is_left_out(tested: Any) -> bool:
    names = ("__unittest_skip__", "__unittest_expecting_failure__")
    return any(getattr(tested, name, False) is True for name in names)


def _parameters(function: Any) -> list[str]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    # ``mock.patch`` as a decorator passes its mocks first.
    patched = [p for p in getattr(function, "patchings", ()) if p.attribute_name is None]
    given = sum(p.new is sys.modules["unittest.mock"].DEFAULT for p in patched)
    names = [
        p.name
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty
    ]
    bound = 1 if names[:1] == ["self"] else 0
    return names[:bound] + names[bound + given :]


def _call_if_there(holder: Any, name: str, target: Any) -> None:
    function = getattr(holder, name, None)
    if function is not None:
        _call_with(function, target)


def _call_with(function: Any, target: Any) -> None:
    function(*[target] * len(_parameters(function)))


def _source(function: Any, lines: list[str]) -> str:
    """The source of a test without its decorators."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code.co_filename != "test.py":
        return ""
    start = code.co_firstlineno - 1
    try:
        block = inspect.getblock(lines[start:])
    except (IndentationError, SyntaxError, IndexError):
        return ""
    text = textwrap.dedent("".join(block))
    at = next(
        (i for i, c in enumerate(text.splitlines()) if c.startswith(("def ", "async def "))), 0
    )
    return "\n".join(text.splitlines()[at:])
