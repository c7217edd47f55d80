"""Follows which names of a test contain values of the program, and which of its checks are about
such values.

Names are followed from the program's functions through assignments, loops, handlers and functions
of the tests. In doubt a name counts as the program's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ctrl_megatron.sandbox.datasets.syntax import (
    FUNCTIONS,
    Function,
    arguments_of,
    base_of,
    bound_in,
    called_name,
    dotted,
    is_fixed,
    is_vacuous,
    last_name,
    leaves,
    may_fail,
    mentions,
    surely_fails,
)
from ctrl_megatron.sandbox.jail.evidence import MADE_BEFORE, MADE_BY_ARGUMENT, MADE_IN_CALL

FIXED, OWN, LEADS, MADE = -1, 0, 1, 2
"""The levels of a name. ``FIXED``: a constant that no call can change. ``OWN``: a value of the
test. ``LEADS``: calling it may call the program. ``MADE``: it may contain a value of the program.
"""
Names = dict[str, int]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LOOKS_ONLY = frozenset(["callable", "hasattr", "id", "isinstance", "print", "repr", "str", "type"])
_CATCH_ALL = frozenset(["AssertionError", "BaseException", "Exception"])
_EXPECTS = frozenset(["raises", "assertRaises", "assertRaisesRegex", "assertRaisesRegexp"])
_PASSES = 3
"""Passes over a text, because a later function may matter to an earlier one."""
_MOST_READ = 20_000
"""Maximum of statements read per text; statements in nested loops are read several times."""
_NAMES_AS_DEAR = 16
"""Copying this many names counts as reading one statement."""
_SELF = "self"
_STDOUT = "sys.stdout"


@dataclass(slots=True)
class _Function:
    """A function of the tests. ``own``: it contains checks about the program. ``given``: it does so
    if an argument is a value of the program.
    """

    own: bool = False
    given: bool = False
    mentions: set[str] = field(default_factory=set)
    leaks: set[str] = field(default_factory=set)
    """Names outside the function that contain a value of the program after a call."""


@dataclass(slots=True)
class ProgramNames:
    """Follows names through texts and collects the nodes to mark."""

    ever: Names
    """The highest level of each name anywhere, which is the level inside functions."""
    leaves: dict[ast.expr, int] = field(default_factory=dict)
    """Expressions that a check depends on, and what the check is about."""
    asserting: dict[ast.expr, int] = field(default_factory=dict)
    """Calls of functions that assert, and what they are about."""
    given: set[ast.expr] = field(default_factory=set)
    """Uses of the tests' functions that pass them a value of the program."""
    expecting: set[ast.stmt] = field(default_factory=set)
    """Blocks that expect an exception of the program."""
    handlers: set[ast.ExceptHandler] = field(default_factory=set)
    """Handlers of exceptions that the program is expected to raise."""
    functions: dict[str, _Function] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    checks: bool = False
    """Whether a check about the program was found outside functions."""
    _given_arguments: bool = False
    """Whether the current function is read as called with values of the program."""
    _calls: int = 0
    _control: bool = False
    """Whether the program decides if the current code is executed."""
    _can_fail: bool = False
    """Whether the current text or function contains a statement that may fail."""
    _surely_fails: bool = False
    """Whether it contains a statement that always fails."""
    _itself: str | None = None
    """The name of the current method's first parameter."""
    _captures: set[str] = field(default_factory=set)
    """Names of the objects that replace stdout."""
    _read: int = 0

    def read(self, body: list[ast.stmt], names: Names) -> Names:
        """The levels of names after ``body``."""
        self._can_fail = any(map(may_fail, body))
        self._surely_fails = any(map(surely_fails, body))
        after, self._read = names, 0
        for _ in range(_PASSES):
            after = self._body(body, dict(names))
        return after

    def __contains__(self, node: ast.AST) -> bool:
        """Whether ``node`` must be marked."""
        noted = (self.leaves, self.asserting, self.given, self.expecting)
        return any(node in nodes for nodes in noted)

    def checks_in(self, tree: ast.Module) -> bool:
        """Whether code outside functions reaches a function with checks about the program."""
        outside = [n for n in tree.body if not isinstance(n, (*FUNCTIONS, ast.ClassDef))]
        reached, new = set[str](), mentions(outside)
        # A decorator may call the function.
        new |= {n.name for n in tree.body if isinstance(n, FUNCTIONS) and n.decorator_list}
        while new:
            reached |= new
            found = [self.functions[name] for name in new if name in self.functions]
            if any(function.own for function in found):
                return True
            new = set[str]().union(*(function.mentions for function in found)) - reached
        return False

    # --- statements ------------------------------------------------------------------------------

    def _body(self, body: Iterable[ast.stmt], names: Names) -> Names:
        for statement in body:
            names = self._statement(statement, names)
        return names

    def _statement(self, node: ast.stmt, names: Names) -> Names:
        self._read += 1
        if self._read > _MOST_READ:
            raise RecursionError
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
                level = self._function(node, names)
                decorated = [self._level(part, names) for part in node.decorator_list]
                if max(decorated, default=OWN) > OWN:
                    self._calls, level = self._calls + 1, MADE
                names[node.name] = level
            case ast.ClassDef():
                return self._class(node, names)
            case _:
                self._level(node, names)
        return names

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, names: Names) -> Names:
        if node.value is None:
            return names
        level = self._level(node.value, names)
        if level == OWN and is_fixed(node.value):
            level = FIXED
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(node, ast.AugAssign):
                level = max(level, self._level(target, names))
            self._bind(target, level, names, node.value)
        return names

    def _bind(
        self, target: ast.AST, level: int, names: Names, value: ast.AST | None = None
    ) -> None:
        if isinstance(target, ast.Name):
            level = MADE if self._control else level
            names[target.id] = level
            self.ever[target.id] = max(level, self.ever.get(target.id, OWN))
        elif isinstance(target, (ast.Tuple, ast.List)):
            values: Sequence[ast.AST | None] = [None] * len(target.elts)
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(values):
                values = value.elts
            for item, of in zip(target.elts, values, strict=True):
                own = level if of is None or level == FIXED else self._level(of, names)
                self._bind(item, FIXED if of is not None and is_fixed(of) else own, names, of)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, max(level, OWN), names)
        else:  # an attribute or an item
            level = MADE if self._control else level
            key = self._key(target)
            if key == _STDOUT and isinstance(value, ast.Name):
                self._captures |= {_STDOUT, value.id}
            self._taint(key, level, names)
            self._taint(self._base(target), level, names)

    def _taint(self, name: str | None, level: int, names: Names) -> None:
        if name is None or level <= OWN or names.get(name) == FIXED or name in self.modules:
            return
        names[name] = max(level, names.get(name, OWN))
        self.ever[name] = max(level, self.ever.get(name, OWN))

    def _assert(self, node: ast.Assert, names: Names) -> Names:
        self._level(node.test, names)
        if not is_vacuous(node.test):
            self._check(node.test, names)
        return names

    def _check(self, test: ast.expr, names: Names) -> None:
        """Collect the parts of a condition that are about the program."""
        if isinstance(test, ast.BoolOp):
            for part in test.values:
                self._check(part, names)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._check(test.operand, names)
        elif isinstance(test, ast.IfExp):
            for part in (test.test, test.body, test.orelse):
                self._check(part, names)
        elif self._level(test, names) == MADE:
            self._note(self.leaves, test, self._about(test, names))

    def _about(self, node: ast.expr, names: Names) -> int:
        held = (self._key(part) for part in ast.walk(node))
        if not any(name is not None and names.get(name) == MADE for name in held):
            return MADE_IN_CALL
        return MADE_BY_ARGUMENT if self._given_arguments else MADE_BEFORE

    def _note(self, where: dict[ast.expr, int], node: ast.expr, about: int) -> None:
        where[node] = max(about, where.get(node, MADE_IN_CALL))
        self.checks = True

    def _key(self, node: ast.AST) -> str | None:
        """The key of a name, or of an attribute of one, in ``Names``. Attributes of a method's
        object have one key in all methods.
        """
        key = dotted(node)
        if key is not None and self._itself is not None and key.startswith(f"{self._itself}."):
            return f"{_SELF}{key.removeprefix(self._itself)}"
        return key

    def _base(self, node: ast.AST) -> str | None:
        """The name at the beginning of ``node``, unless it is the method's own object, whose
        attributes have keys of their own.
        """
        name = base_of(node)
        return name if name != self._itself else None

    def _branches(self, node: ast.If | ast.While, names: Names) -> Names:
        made = self._level(node.test, names) == MADE
        branches = [*node.body, *node.orelse]
        if made and (any(map(may_fail, branches)) or (self._can_fail and leaves(branches))):
            self._check(node.test, names)
        before, self._control = self._control, self._control or made
        body = self._repeated(node.body, names, isinstance(node, ast.While))
        after = joined(body, self._body(node.orelse, dict(names)))
        self._control = before
        return after

    def _repeated(self, body: list[ast.stmt], names: Names, loop: bool) -> Names:
        after = self._body(body, dict(names))
        return self._body(body, joined(names, after)) if loop else after

    def _loop(self, node: ast.For | ast.AsyncFor, names: Names) -> Names:
        level = self._level(node.iter, names)
        start = dict(names)
        self._bind_items(node.target, node.iter, level, start)
        before, self._control = self._control, self._control or level == MADE
        after = joined(names, self._repeated(node.body, start, True))
        after = self._body(node.orelse, after)
        self._control = before
        return after

    def _bind_items(self, target: ast.AST, of: ast.expr, level: int, names: Names) -> None:
        items = of.elts if isinstance(of, (ast.List, ast.Tuple, ast.Set)) else []
        fixed = bool(items) and all(map(is_fixed, items))
        self._bind(target, FIXED if fixed and level == OWN else level, names)

    def _block(self, node: ast.With | ast.AsyncWith, names: Names) -> Names:
        calls = self._calls
        for item in node.items:
            level = self._level(item.context_expr, names)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, level, names)
        after = self._body(node.body, names)
        if self._calls > calls:
            expects = any(called_name(item.context_expr) in _EXPECTS for item in node.items)
            for item in node.items:
                given = [] if expects else arguments_of(item.context_expr)
                for part in filter(None, (*given, item.optional_vars)):
                    self._taint_given(part, after)
            if expects:
                self.expecting.add(node)
                self.checks = True
        return after

    def _handled(self, node: ast.Try | ast.TryStar, names: Names) -> Names:
        calls, before = self._calls, self._control
        body = self._body(node.body, dict(names))
        called = self._calls > calls
        if called:
            # Read again: where the program ended the body decides what the body assigned.
            self._control = True
            body = self._body(node.body, dict(names))
        ends = [self._body(node.orelse, dict(body))]
        for handler in node.handlers:
            start = joined(names, body)
            if handler.type is not None:
                self._level(handler.type, start)
            if handler.name:
                start[handler.name] = MADE if called else OWN
            if called and self._expects(node, handler):
                self.handlers.add(handler)
                self.checks = True
            ends.append(self._body(handler.body, start))
        self._control = before
        after = ends[0]
        for end in ends[1:]:
            after = joined(after, end)
        return self._body(node.finalbody, after)

    def _expects(self, node: ast.Try | ast.TryStar, handler: ast.ExceptHandler) -> bool:
        """Whether ``handler`` can make the test pass by catching an exception of the program:
        without the exception the test fails, or it accepts this exception in place of a result.
        """
        if any(map(may_fail, node.orelse)) or any(map(surely_fails, node.body)):
            return True
        if leaves(handler.body) and self._surely_fails:
            return True
        anything = handler.type is None or last_name(handler.type) in _CATCH_ALL
        return not anything and any(map(may_fail, node.body))

    def _cases(self, node: ast.Match, names: Names) -> Names:
        level = self._level(node.subject, names)
        if level == MADE and any(may_fail(s) for case in node.cases for s in case.body):
            self._check(node.subject, names)
        before, self._control = self._control, self._control or level == MADE
        after = dict(names)
        for case in node.cases:
            start = dict(names)
            for part in ast.walk(case.pattern):
                name = getattr(part, "name", None) or getattr(part, "rest", None)
                if isinstance(name, str):
                    start[name] = level
            after = joined(after, self._body(case.body, start))
        self._control = before
        return after

    def _import(self, node: ast.Import | ast.ImportFrom, names: Names) -> Names:
        for alias in node.names:
            name = (alias.asname or alias.name).split(".")[0]
            names[name] = OWN
            self.modules.add(name)
        return names

    def _class(self, node: ast.ClassDef, names: Names) -> Names:
        inner, level = dict(names), OWN
        for base in node.bases:
            level = max(level, self._level(base, names))
        for statement in node.body:
            if isinstance(statement, FUNCTIONS):
                level = max(level, self._function(statement, inner, in_class=True))
            else:
                calls = self._calls
                inner = self._statement(statement, inner)
                level = max(level, LEADS if self._calls > calls else OWN)
                for name in bound_in([statement]):
                    key = f"{_SELF}.{name}"
                    self.ever[key] = max(inner.get(name, OWN), self.ever.get(key, OWN))
        names[node.name] = min(level, LEADS)
        self.ever[node.name] = max(names[node.name], self.ever.get(node.name, OWN))
        return names

    def _function(self, node: Function, names: Names, *, in_class: bool = False) -> int:
        """The level of the function's name. Its body is read twice: as called with values of the
        test, and as called with values of the program.
        """
        of = node.args
        parameters = [a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
        parameters += [a.arg for a in (of.vararg, of.kwarg) if a is not None]
        itself, rest = (parameters[:1], parameters[1:]) if in_class else ([], parameters)
        outside = dict(self.ever)
        for name, level in names.items():
            outside[name] = max(level, outside.get(name, OWN))
        self._read += len(outside) // _NAMES_AS_DEAR
        function = self.functions.setdefault(node.name, _Function())
        mentioned = mentions(node.body)
        function.mentions |= mentioned
        around = (self.checks, self._given_arguments, self._control, self._itself)
        fails = (self._can_fail, self._surely_fails)
        self._control, self._can_fail = False, any(map(may_fail, node.body))
        self._surely_fails = any(map(surely_fails, node.body))
        self._itself = itself[0] if itself else self._itself
        self.checks, calls = False, self._calls
        own = dict.fromkeys(parameters, OWN)
        after = self._body(node.body, outside | own)
        function.own |= self.checks
        local = bound_in(node.body) | own.keys()
        function.leaks |= {name for name, level in after.items() if level == MADE} - local
        leads = self._calls > calls or any(
            outside.get(name, OWN) > OWN for name in mentioned - own.keys()
        )
        if rest:
            self.checks, self._given_arguments = False, True
            self._body(node.body, outside | own | dict.fromkeys(rest, MADE))
            function.given |= self.checks
        self.checks, self._given_arguments, self._control, self._itself = around
        self._can_fail, self._surely_fails = fails
        level = LEADS if leads else OWN
        self.ever[node.name] = max(level, self.ever.get(node.name, OWN))
        return level

    # --- expressions -----------------------------------------------------------------------------

    def _level(self, node: ast.AST, names: Names) -> int:
        """The level of an expression; its calls are collected."""
        level, parts = OWN, [node]
        while parts:
            part = parts.pop()
            if isinstance(part, ast.Name):
                level = max(level, names.get(part.id, OWN))
            elif isinstance(part, ast.Call):
                level = max(level, self._call(part, names))
            elif isinstance(part, ast.Attribute):
                of = self._level(part.value, names)
                of = MADE if of > OWN and not part.attr.startswith("__") else of
                level = max(level, of, names.get(self._key(part) or "", OWN))
            elif isinstance(part, ast.Lambda):
                inner = names | dict.fromkeys((a.arg for a in part.args.args), OWN)
                level = max(level, min(self._level(part.body, inner), LEADS))
            elif isinstance(part, ast.NamedExpr):
                held = self._level(part.value, names)
                self._bind(part.target, held, names)
                level = max(level, held)
            elif isinstance(part, COMPREHENSIONS):
                level = max(level, self._comprehension(part, names))
            elif not isinstance(part, ast.Constant):
                parts.extend(ast.iter_child_nodes(part))
        return level

    def _comprehension(
        self,
        node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp,
        names: Names,
    ) -> int:
        inner, level = dict(names), OWN
        for generator in node.generators:
            of = self._level(generator.iter, inner)
            self._bind_items(generator.target, generator.iter, of, inner)
            level = max(level, of, *(self._level(test, inner) for test in generator.ifs), OWN)
        items = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        return max(level, *(self._level(item, inner) for item in items))

    def _call(self, node: ast.Call, names: Names) -> int:
        of = self._level(node.func, names)
        arguments = arguments_of(node)
        levels = [self._level(argument, names) for argument in arguments]
        given, called = max(levels, default=OWN), called_name(node)
        if of <= OWN and given == LEADS and called in _LOOKS_ONLY:
            return OWN
        if max(of, given) <= OWN:
            return OWN
        self._calls += 1
        for name in self._captures:
            self._taint(name, MADE, names)
        if of > OWN:
            for argument in arguments:
                self._taint_given(argument, names)
            if called in self.functions:
                names |= dict.fromkeys(self.functions[called].leaks, MADE)
        elif given == MADE:
            self._changes(node, names)
        if given > OWN:
            self._gives(node, arguments)
            self._asserts(node, called, levels, names)
        return MADE

    def _taint_given(self, argument: ast.AST, names: Names) -> None:
        """Raise the level of an argument, which the call may change."""
        parts = [argument]
        while parts:
            part = parts.pop()
            if isinstance(part, (ast.List, ast.Tuple, ast.Starred, ast.Dict)):
                parts.extend(ast.iter_child_nodes(part))
            elif isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
                name = self._key(part) or self._base(part)
                if name is not None and names.get(name, OWN) == OWN:
                    self._taint(name, MADE, names)
            for name in self._reached(part):
                if names.get(name) == OWN:
                    self._taint(name, MADE, names)

    def _reached(self, part: ast.AST) -> set[str]:
        """Names of the test that the program may change by calling the argument."""
        if isinstance(part, ast.Lambda):
            return mentions([ast.Expr(part.body)])
        if isinstance(part, ast.Attribute):
            return {self._key(part.value) or ""}
        function = self.functions.get(part.id) if isinstance(part, ast.Name) else None
        return function.mentions if function is not None else set()

    def _changes(self, node: ast.Call, names: Names) -> None:
        """Raise the level of objects that may keep a value of the program that they are called
        with.
        """
        if isinstance(node.func, ast.Attribute):
            base = base_of(node.func)
            keepers = node.args[:1] if base in self.modules else [node.func]
        else:
            keepers = node.args if called_name(node) in self.functions else []
        for keeper in keepers:
            self._taint(self._base(keeper), MADE, names)
            if isinstance(keeper, ast.Attribute):
                self._taint(self._key(keeper.value), MADE, names)

    def _gives(self, node: ast.Call, arguments: list[ast.expr]) -> None:
        """Collect functions of the tests that are called, or passed on, with a value of the
        program.
        """
        for taken in (node.func, *arguments):
            name = last_name(taken)
            function = self.functions.get(name) if name is not None else None
            if function is not None and function.given:
                self.given.add(taken)
                self.checks = True

    def _asserts(self, node: ast.Call, called: str | None, levels: list[int], names: Names) -> None:
        if called is None or called in self.functions:
            return
        expects = called in _EXPECTS and len(node.args) > 1
        if not (expects or called.startswith("assert")):
            return
        if called in ("assertTrue", "assert_") and any(map(is_vacuous, node.args[:1])):
            return
        if expects or max(levels[:2], default=OWN) == MADE:
            self._note(self.asserting, node, self._about(node, names))


def joined(one: Names, other: Names) -> Names:
    """The levels of names after one of two alternatives."""
    names = {}
    for name in one.keys() | other.keys():
        levels = one.get(name, OWN), other.get(name, OWN)
        names[name] = max(levels) if name in one and name in other else max(*levels, OWN)
    return names
