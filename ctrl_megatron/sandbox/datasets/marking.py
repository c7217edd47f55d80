"""Which checks of a test are about the program, and the text of the test in which each says when it
is evaluated (``jail.evidence``).

Names are followed from the program's functions through assignments, loops, handlers and functions
of the tests. In doubt a name counts as the program's: what a check is about is decided here;
whether it was evaluated, and after a call of the program, only when the test runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctrl_megatron.sandbox.jail.evidence import (
    MADE_BEFORE,
    MADE_BY_ARGUMENT,
    MADE_IN_CALL,
    NAME,
)

_FIXED, _OWN, _LEADS, _MADE = -1, 0, 1, 2
"""What a name holds: a constant that no call can change, the test's own, what leads to the program
when it is called, what may have come from the program."""
_Names = dict[str, int]
_SHAPES = (ast.BoolOp, ast.IfExp, ast.NamedExpr, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOKS_ONLY = frozenset(["callable", "hasattr", "id", "isinstance", "print", "repr", "str", "type"])
_FAILS = frozenset(["abort", "exit", "fail", "quit", "_exit"])
_CATCH_ALL = frozenset(["AssertionError", "BaseException", "Exception"])
_EXPECTS = frozenset(["raises", "assertRaises", "assertRaisesRegex", "assertRaisesRegexp"])
_PASSES = 3
"""Over a text: what a later function does may matter to an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedTests:
    """``setup`` and ``tests`` as they are to run; None for a test whose passing after a call of the
    program says enough. ``unchecked``: tests that check nothing of the program, whatever happens.
    """

    setup: str
    tests: tuple[str | None, ...]
    unchecked: tuple[int, ...]


def mark_tests(
    setup: str, setup_tree: ast.Module, trees: Sequence[ast.Module], stubs: Iterable[str]
) -> MarkedTests:
    """Mark tests that call ``stubs`` of the program; the trees are changed. Raises ``ValueError``
    for texts that are nested too deeply.
    """
    try:
        return _mark(setup, setup_tree, trees, frozenset(stubs))
    except RecursionError as error:
        raise ValueError("the tests are nested too deeply") from error


def _mark(
    setup: str, setup_tree: ast.Module, trees: Sequence[ast.Module], stubs: frozenset[str]
) -> MarkedTests:
    reading = _Reading(dict.fromkeys(stubs, _LEADS))
    names = reading.read(_pruned(setup_tree).body, dict.fromkeys(stubs, _LEADS))
    texts: list[str | None] = []
    unchecked: list[int] = []
    for index, tree in enumerate(trees):
        names |= dict.fromkeys(stubs, _LEADS)
        if _is_plain(tree, names):
            texts.append(None)
            continue
        reading.checks = False
        names = _joined(names, reading.read(_pruned(tree).body, names))
        if not (reading.checks or reading.checks_in(tree)):
            unchecked.append(index)
        texts.append(_marked(tree, reading))
    # Only now it is known which functions of the setup are given something of the program.
    if any(isinstance(node, (ast.Assert, *_FUNCTIONS)) for node in ast.walk(setup_tree)):
        setup = _marked(setup_tree, reading)
    return MarkedTests(setup=setup, tests=tuple(texts), unchecked=tuple(unchecked))


def _is_plain(tree: ast.Module, names: _Names) -> bool:
    """Whether it is one assert that certainly calls the program for what it compares."""
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Assert):
        return False
    test, calls = tree.body[0].test, False
    if isinstance(test, (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.JoinedStr)):
        return False
    if isinstance(test, ast.Compare) and len(test.ops) > 1:
        return False
    for node in ast.walk(test):
        if isinstance(node, (*_SHAPES, *_COMPREHENSIONS)):
            return False
        calls |= (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and names.get(node.func.id) == _LEADS
        )
    return calls


@dataclass(slots=True)
class _Function:
    """Of the tests. ``own``: it has checks that are about the program; ``given``: it has some where
    it is given something of the program.
    """

    own: bool = False
    given: bool = False
    mentions: set[str] = field(default_factory=set)
    leaks: set[str] = field(default_factory=set)
    """Names outside of it that hold something of the program after a call."""


@dataclass(slots=True)
class _Reading:
    """Follows names through texts and notes what is to be marked."""

    ever: _Names
    """The most that a name has held anywhere: what functions find outside of them."""
    leaves: dict[ast.expr, int] = field(default_factory=dict)
    """Expressions that a check depends on, and what it is about."""
    asserting: dict[ast.expr, int] = field(default_factory=dict)
    """Calls of functions that assert."""
    given: set[ast.expr] = field(default_factory=set)
    """Functions of the tests where they are given something of the program."""
    expecting: set[ast.stmt] = field(default_factory=set)
    """Blocks of which an exception of the program is expected."""
    handlers: set[ast.ExceptHandler] = field(default_factory=set)
    """Handlers of exceptions that are expected of the program."""
    functions: dict[str, _Function] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    checks: bool = False
    """A check about the program was found outside of functions."""
    _given_arguments: bool = False
    """The function that is read is taken to be given something of the program."""
    _calls: int = 0
    _control: bool = False
    """What is read happens or not, depending on the program."""
    _can_fail: bool = False
    """The text or function that is read has something that may end it."""
    _surely_fails: bool = False
    """It has something that ends it."""
    _itself: str | None = None
    """What the method that is read calls its object."""

    def read(self, body: list[ast.stmt], names: _Names) -> _Names:
        """What names hold after ``body``."""
        self._can_fail = any(map(_may_fail, body))
        self._surely_fails = any(map(_surely_fails, body))
        after = names
        for _ in range(_PASSES):
            after = self._body(body, dict(names))
        return after

    def checks_in(self, tree: ast.Module) -> bool:
        """Whether code outside of functions leads to a function with checks about the program."""
        outside = [n for n in tree.body if not isinstance(n, (*_FUNCTIONS, ast.ClassDef))]
        reached, new = set[str](), _mentions(outside)
        while new:
            reached |= new
            found = [self.functions[name] for name in new if name in self.functions]
            if any(function.own for function in found):
                return True
            new = set[str]().union(*(function.mentions for function in found)) - reached
        return False

    # --- statements ------------------------------------------------------------------------------

    def _body(self, body: Iterable[ast.stmt], names: _Names) -> _Names:
        for statement in body:
            names = self._statement(statement, names)
        return names

    def _statement(self, node: ast.stmt, names: _Names) -> _Names:
        match node:
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                return self._assign(node, names)
            case ast.Assert():
                return self._assert(node, names)
            case ast.If() | ast.While():
                return self._branches(node, names)
            case ast.For() | ast.AsyncFor():
                return self._loop(node, names)
            case ast.With() | ast.AsyncWith():
                return self._block(node, names)
            case ast.Try() | ast.TryStar():
                return self._handled(node, names)
            case ast.Match():
                return self._cases(node, names)
            case ast.Import() | ast.ImportFrom():
                return self._import(node, names)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names[node.name] = self._function(node, names)
            case ast.ClassDef():
                return self._class(node, names)
            case _:
                self._level(node, names)
        return names

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, names: _Names) -> _Names:
        if node.value is None:
            return names
        level = self._level(node.value, names)
        if level == _OWN and _is_fixed(node.value):
            level = _FIXED
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(node, ast.AugAssign):
                level = max(level, self._level(target, names))
            self._bind(target, level, names, node.value)
        return names

    def _bind(
        self, target: ast.AST, level: int, names: _Names, value: ast.AST | None = None
    ) -> None:
        if isinstance(target, ast.Name):
            level = _MADE if self._control else level
            names[target.id] = level
            self.ever[target.id] = max(level, self.ever.get(target.id, _OWN))
        elif isinstance(target, (ast.Tuple, ast.List)):
            values: Sequence[ast.AST | None] = [None] * len(target.elts)
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(values):
                values = value.elts
            for item, of in zip(target.elts, values, strict=True):
                own = level if of is None or level == _FIXED else self._level(of, names)
                self._bind(item, _FIXED if of is not None and _is_fixed(of) else own, names, of)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, max(level, _OWN), names)
        else:  # part of something
            level = _MADE if self._control else level
            base = _base(target)
            self._taint(_dotted(target), level, names)
            self._taint(base if base != self._itself else None, level, names)

    def _taint(self, name: str | None, level: int, names: _Names) -> None:
        if name is None or level <= _OWN or names.get(name) == _FIXED or name in self.modules:
            return
        names[name] = max(level, names.get(name, _OWN))
        self.ever[name] = max(level, self.ever.get(name, _OWN))

    def _assert(self, node: ast.Assert, names: _Names) -> _Names:
        self._level(node.test, names)
        if not is_vacuous(node.test):
            self._check(node.test, names)
        return names

    def _check(self, test: ast.expr, names: _Names) -> None:
        """Note the parts of a condition that are about the program."""
        if isinstance(test, ast.BoolOp):
            for part in test.values:
                self._check(part, names)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._check(test.operand, names)
        elif isinstance(test, ast.IfExp):
            for part in (test.test, test.body, test.orelse):
                self._check(part, names)
        elif self._level(test, names) == _MADE:
            self._note(self.leaves, test, self._about(test, names))

    def _about(self, node: ast.expr, names: _Names) -> int:
        held = (_dotted(part) for part in ast.walk(node))
        if not any(name is not None and names.get(name) == _MADE for name in held):
            return MADE_IN_CALL
        return MADE_BY_ARGUMENT if self._given_arguments else MADE_BEFORE

    def _note(self, where: dict[ast.expr, int], node: ast.expr, about: int) -> None:
        where[node] = max(about, where.get(node, MADE_IN_CALL))
        self.checks = True

    def _branches(self, node: ast.If | ast.While, names: _Names) -> _Names:
        made = self._level(node.test, names) == _MADE
        branches = [*node.body, *node.orelse]
        if made and (any(map(_may_fail, branches)) or (self._can_fail and _leaves(branches))):
            self._check(node.test, names)
        before, self._control = self._control, self._control or made
        body = self._repeated(node.body, names, isinstance(node, ast.While))
        after = _joined(body, self._body(node.orelse, dict(names)))
        self._control = before
        return after

    def _repeated(self, body: list[ast.stmt], names: _Names, loop: bool) -> _Names:
        after = self._body(body, dict(names))
        return self._body(body, _joined(names, after)) if loop else after

    def _loop(self, node: ast.For | ast.AsyncFor, names: _Names) -> _Names:
        level = self._level(node.iter, names)
        start = dict(names)
        self._bind_items(node.target, node.iter, level, start)
        before, self._control = self._control, self._control or level == _MADE
        after = _joined(names, self._repeated(node.body, start, True))
        after = self._body(node.orelse, after)
        self._control = before
        return after

    def _bind_items(self, target: ast.AST, of: ast.expr, level: int, names: _Names) -> None:
        items = of.elts if isinstance(of, (ast.List, ast.Tuple, ast.Set)) else []
        fixed = bool(items) and all(map(_is_fixed, items))
        self._bind(target, _FIXED if fixed and level == _OWN else level, names)

    def _block(self, node: ast.With | ast.AsyncWith, names: _Names) -> _Names:
        calls = self._calls
        for item in node.items:
            level = self._level(item.context_expr, names)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, level, names)
        after = self._body(node.body, names)
        if self._calls > calls:
            expects = any(_called_name(item.context_expr) in _EXPECTS for item in node.items)
            for item in node.items:
                given = [] if expects else _arguments(item.context_expr)
                for part in filter(None, (*given, item.optional_vars)):
                    self._taint_given(part, after)
            if expects:
                self.expecting.add(node)
                self.checks = True
        return after

    def _handled(self, node: ast.Try | ast.TryStar, names: _Names) -> _Names:
        calls, before = self._calls, self._control
        body = self._body(node.body, dict(names))
        called = self._calls > calls
        if called:
            # Once more: what the body binds depends on where the program ended it.
            self._control = True
            body = self._body(node.body, dict(names))
        ends = [self._body(node.orelse, dict(body))]
        for handler in node.handlers:
            start = _joined(names, body)
            if handler.type is not None:
                self._level(handler.type, start)
            if handler.name:
                start[handler.name] = _MADE if called else _OWN
            if called and self._expects(node, handler):
                self.handlers.add(handler)
                self.checks = True
            ends.append(self._body(handler.body, start))
        self._control = before
        after = ends[0]
        for end in ends[1:]:
            after = _joined(after, end)
        return self._body(node.finalbody, after)

    def _expects(self, node: ast.Try | ast.TryStar, handler: ast.ExceptHandler) -> bool:
        """Whether a test may end well because ``handler`` has caught an exception of the program:
        without one it fails, or it accepts this kind of exception in the place of a result.
        """
        if any(map(_may_fail, node.orelse)) or any(map(_surely_fails, node.body)):
            return True
        if _leaves(handler.body) and self._surely_fails:
            return True
        anything = handler.type is None or _last_name(handler.type) in _CATCH_ALL
        return not anything and any(map(_may_fail, node.body))

    def _cases(self, node: ast.Match, names: _Names) -> _Names:
        level = self._level(node.subject, names)
        if level == _MADE and any(_may_fail(s) for case in node.cases for s in case.body):
            self._check(node.subject, names)
        before, self._control = self._control, self._control or level == _MADE
        after = dict(names)
        for case in node.cases:
            start = dict(names)
            for part in ast.walk(case.pattern):
                name = getattr(part, "name", None) or getattr(part, "rest", None)
                if isinstance(name, str):
                    start[name] = level
            after = _joined(after, self._body(case.body, start))
        self._control = before
        return after

    def _import(self, node: ast.Import | ast.ImportFrom, names: _Names) -> _Names:
        for alias in node.names:
            name = (alias.asname or alias.name).split(".")[0]
            names[name] = _OWN
            self.modules.add(name)
        return names

    def _class(self, node: ast.ClassDef, names: _Names) -> _Names:
        inner, level = dict(names), _OWN
        for base in node.bases:
            level = max(level, self._level(base, names))
        for statement in node.body:
            if isinstance(statement, _FUNCTIONS):
                level = max(level, self._function(statement, inner, in_class=True))
            else:
                calls = self._calls
                inner = self._statement(statement, inner)
                level = max(level, _LEADS if self._calls > calls else _OWN)
        names[node.name] = min(level, _LEADS)
        self.ever[node.name] = max(names[node.name], self.ever.get(node.name, _OWN))
        return names

    def _function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, names: _Names, *, in_class: bool = False
    ) -> int:
        """What its name holds. It is read as called with things of the test's own, and as given
        something of the program.
        """
        of = node.args
        parameters = [a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
        parameters += [a.arg for a in (of.vararg, of.kwarg) if a is not None]
        itself, rest = (parameters[:1], parameters[1:]) if in_class else ([], parameters)
        outside = dict(self.ever)
        for name, level in names.items():
            outside[name] = max(level, outside.get(name, _OWN))
        function = self.functions.setdefault(node.name, _Function())
        mentioned = _mentions(node.body)
        function.mentions |= mentioned
        around = (self.checks, self._given_arguments, self._control, self._itself)
        fails = (self._can_fail, self._surely_fails)
        self._control, self._can_fail = False, any(map(_may_fail, node.body))
        self._surely_fails = any(map(_surely_fails, node.body))
        self._itself = itself[0] if itself else self._itself
        self.checks, calls = False, self._calls
        own = dict.fromkeys(parameters, _OWN)
        after = self._body(node.body, outside | own)
        function.own |= self.checks
        local = _bound_in(node.body) | own.keys()
        function.leaks |= {name for name, level in after.items() if level == _MADE} - local
        leads = self._calls > calls or any(
            outside.get(name, _OWN) > _OWN for name in mentioned - own.keys()
        )
        if rest:
            self.checks, self._given_arguments = False, True
            self._body(node.body, outside | own | dict.fromkeys(rest, _MADE))
            function.given |= self.checks
        self.checks, self._given_arguments, self._control, self._itself = around
        self._can_fail, self._surely_fails = fails
        level = _LEADS if leads else _OWN
        self.ever[node.name] = max(level, self.ever.get(node.name, _OWN))
        return level

    # --- expressions -----------------------------------------------------------------------------

    def _level(self, node: ast.AST, names: _Names) -> int:
        """What an expression may hold; its calls are noted."""
        level, parts = _OWN, [node]
        while parts:
            part = parts.pop()
            if isinstance(part, ast.Name):
                level = max(level, names.get(part.id, _OWN))
            elif isinstance(part, ast.Call):
                level = max(level, self._call(part, names))
            elif isinstance(part, ast.Attribute):
                of = self._level(part.value, names)
                of = _MADE if of > _OWN and not part.attr.startswith("__") else of
                level = max(level, of, names.get(_dotted(part) or "", _OWN))
            elif isinstance(part, ast.Lambda):
                inner = names | dict.fromkeys((a.arg for a in part.args.args), _OWN)
                level = max(level, min(self._level(part.body, inner), _LEADS))
            elif isinstance(part, ast.NamedExpr):
                held = self._level(part.value, names)
                self._bind(part.target, held, names)
                level = max(level, held)
            elif isinstance(part, _COMPREHENSIONS):
                level = max(level, self._comprehension(part, names))
            elif not isinstance(part, ast.Constant):
                parts.extend(ast.iter_child_nodes(part))
        return level

    def _comprehension(
        self,
        node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp,
        names: _Names,
    ) -> int:
        inner, level = dict(names), _OWN
        for generator in node.generators:
            of = self._level(generator.iter, inner)
            self._bind_items(generator.target, generator.iter, of, inner)
            level = max(level, of, *(self._level(test, inner) for test in generator.ifs), _OWN)
        items = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        return max(level, *(self._level(item, inner) for item in items))

    def _call(self, node: ast.Call, names: _Names) -> int:
        of = self._level(node.func, names)
        arguments = _arguments(node)
        levels = [self._level(argument, names) for argument in arguments]
        given, called = max(levels, default=_OWN), _called_name(node)
        if of <= _OWN and given == _LEADS and called in _LOOKS_ONLY:
            return _OWN
        if max(of, given) <= _OWN:
            return _OWN
        self._calls += 1
        if of > _OWN:
            for argument in arguments:
                self._taint_given(argument, names)
            for name in self.functions[called].leaks if called in self.functions else ():
                self._taint(name, _MADE, names)
        elif given == _MADE:
            self._changes(node, names)
        if given > _OWN:
            self._gives(node, arguments)
            self._asserts(node, called, levels, names)
        return _MADE

    def _taint_given(self, argument: ast.AST, names: _Names) -> None:
        """What is given to a call may come back changed."""
        parts = [argument]
        while parts:
            part = parts.pop()
            if isinstance(part, (ast.List, ast.Tuple, ast.Starred, ast.Dict)):
                parts.extend(ast.iter_child_nodes(part))
            elif isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
                name = _dotted(part) or _base(part)
                if name is not None and names.get(name, _OWN) == _OWN:
                    self._taint(name, _MADE, names)

    def _changes(self, node: ast.Call, names: _Names) -> None:
        """A call that is given something of the program may keep it where it can."""
        if isinstance(node.func, ast.Attribute):
            base = _base(node.func)
            keepers = node.args[:1] if base in self.modules else [node.func]
        else:
            keepers = node.args if _called_name(node) in self.functions else []
        for keeper in keepers:
            name = _base(keeper)
            self._taint(name if name != self._itself else None, _MADE, names)
            if isinstance(keeper, ast.Attribute):
                self._taint(_dotted(keeper.value), _MADE, names)

    def _gives(self, node: ast.Call, arguments: list[ast.expr]) -> None:
        """Note functions of the tests that are called, or passed on, with something of the
        program.
        """
        for taken in (node.func, *arguments):
            name = _last_name(taken)
            function = self.functions.get(name) if name is not None else None
            if function is not None and function.given:
                self.given.add(taken)
                self.checks = True

    def _asserts(
        self, node: ast.Call, called: str | None, levels: list[int], names: _Names
    ) -> None:
        if called is None or called in self.functions:
            return
        expects = called in _EXPECTS and len(node.args) > 1
        if not (expects or called.startswith("assert")):
            return
        if called in ("assertTrue", "assert_") and is_vacuous(node.args[0]):
            return
        if expects or max(levels[:2], default=_OWN) == _MADE:
            self._note(self.asserting, node, self._about(node, names))


# --- what is marked --------------------------------------------------------------------------


def _marked(tree: ast.Module, reading: _Reading) -> str:
    return ast.unparse(_Marker(reading).visit(tree))


def _says(method: str, *arguments: ast.expr | bool) -> ast.Call:
    given = [a if isinstance(a, ast.expr) else ast.Constant(a) for a in arguments]
    function = ast.Attribute(ast.Name(NAME, ast.Load()), method, ast.Load())
    return ast.Call(function, given, [])


class _Marker(ast.NodeTransformer):
    def __init__(self, reading: _Reading) -> None:
        self._reading = reading
        self._goes_on = False
        """A loop that is left or gone on with has an end that fails."""

    def visit(self, node: Any) -> Any:
        marked, reading = super().visit(node), self._reading
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
        before, self._goes_on = self._goes_on, any(map(_may_fail, node.orelse))
        self.generic_visit(node)
        self._goes_on = before
        return node

    def visit_Try(self, node: ast.Try) -> ast.Try:
        checks = any(map(_may_fail, node.body))
        for handler in node.handlers:
            self._mark_handler(handler, checks)
        self.generic_visit(node)
        return node

    def _mark_handler(self, node: ast.ExceptHandler, checks: bool) -> None:
        parts = [part for statement in node.body for part in _own_parts(statement)]
        answers = any(
            isinstance(part, (ast.Assign, ast.AugAssign, ast.NamedExpr, ast.Raise, ast.Assert))
            or (isinstance(part, ast.Return) and part.value is not None)
            or (isinstance(part, (ast.Break, ast.Continue)) and self._goes_on)
            for part in parts
        ) or any(map(_may_fail, node.body))
        counts = node in self._reading.handlers
        node.body.insert(0, ast.Expr(_says("caught", counts, answers, checks)))


class _Pruner(ast.NodeTransformer):
    """Takes out what never runs, and the guard of what runs where a file is the program."""

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


def is_main_guard(test: ast.expr) -> bool:
    """Whether it is ``__name__ == "__main__"``."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1):
        return False
    sides = [test.left, *test.comparators]
    named = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
    main = any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)
    return named and main and isinstance(test.ops[0], ast.Eq)


def _known(test: ast.expr) -> bool | None:
    if is_main_guard(test):
        return True
    return bool(test.value) if isinstance(test, ast.Constant) else None


# --- what a text says ------------------------------------------------------------------------


def _joined(one: _Names, other: _Names) -> _Names:
    names = {}
    for name in one.keys() | other.keys():
        levels = one.get(name, _OWN), other.get(name, _OWN)
        names[name] = max(levels) if name in one and name in other else max(*levels, _OWN)
    return names


def _is_fixed(node: ast.AST) -> bool:
    if isinstance(node, ast.Tuple):
        return all(map(_is_fixed, node.elts))
    if isinstance(node, ast.UnaryOp):
        return _is_fixed(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_fixed(node.left) and _is_fixed(node.right)
    return isinstance(node, ast.Constant)


def is_vacuous(test: ast.expr) -> bool:
    """Whether it is true whatever its parts are."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, (ast.Tuple, ast.List, ast.Set)):
        return bool(test.elts) and not any(isinstance(item, ast.Starred) for item in test.elts)
    if isinstance(test, ast.Dict):
        return bool(test.keys) and None not in test.keys
    if isinstance(test, ast.BoolOp):
        return (any if isinstance(test.op, ast.Or) else all)(map(is_vacuous, test.values))
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        sides = test.left, test.comparators[0]
        return all(map(_is_fixed, sides)) and ast.dump(sides[0]) == ast.dump(sides[1])
    return isinstance(test, (ast.Lambda, ast.GeneratorExp))


def _own_parts(statement: ast.AST) -> Iterator[ast.AST]:
    """It and its parts, without those of functions and classes that it defines."""
    parts = [statement]
    while parts:
        part = parts.pop()
        yield part
        if not isinstance(part, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            parts.extend(ast.iter_child_nodes(part))


def _may_fail(statement: ast.AST) -> bool:
    """Whether it may end the test."""
    for part in _own_parts(statement):
        if isinstance(part, ast.Raise):
            return True
        if isinstance(part, ast.Assert) and not is_vacuous(part.test):
            return True
        name = _called_name(part)
        if name is not None and (name in _FAILS or name.startswith("assert")):
            return True
    return False


def _surely_fails(statement: ast.AST) -> bool:
    if isinstance(statement, ast.Assert):
        return isinstance(statement.test, ast.Constant) and not statement.test.value
    call = statement.value if isinstance(statement, ast.Expr) else statement
    return isinstance(statement, ast.Raise) or _called_name(call) in _FAILS


def _leaves(statements: Iterable[ast.AST]) -> bool:
    leaving = (ast.Return, ast.Break, ast.Continue)
    return any(isinstance(part, leaving) for node in statements for part in _own_parts(node))


def _mentions(statements: Iterable[ast.AST]) -> set[str]:
    """Names, attributes, and texts that may be names."""
    found = set[str]()
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, (ast.Name, ast.Attribute)):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def _bound_in(statements: Iterable[ast.AST]) -> set[str]:
    bound, elsewhere = set[str](), set[str]()
    for statement in statements:
        for node in _own_parts(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                elsewhere.update(node.names)
    return bound - elsewhere


def _last_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _called_name(node: ast.AST) -> str | None:
    return _last_name(node.func) if isinstance(node, ast.Call) else None


def _arguments(node: ast.expr) -> list[ast.expr]:
    if not isinstance(node, ast.Call):
        return []
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def _dotted(node: ast.AST) -> str | None:
    """Of a name ``a`` or an attribute ``a.b``."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def _base(node: ast.AST) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
