"""The judge's proxies for objects, classes and functions of the program: each operation of a test
on a proxy is sent to the program.

How much the program's answer counts depends on how the tests use the object. Where a test may
expect data, an object of the program gives no answer that would decide the verdict: it equals no
data, has no attribute that data has, and no operation except calls, attributes and items passes the
test's data to it. Answers are of exact builtin types.
"""

from __future__ import annotations

import builtins
import functools
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, NoReturn, Protocol

from ctrl_megatron.sandbox.jail.codec import DATA_ATTRIBUTES
from ctrl_megatron.sandbox.jail.decoys import family_of

_PREDICATES = frozenset(n for n in DATA_ATTRIBUTES if n.startswith(("is", "starts", "ends")))
_SPECIAL_ATTRIBUTES = frozenset(("__dict__", "__name__", "__qualname__", "__doc__", "__wrapped__"))
_OBSERVATIONS = "getitem reversed round trunc floor ceil"
_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul divmod and or xor lshift rshift"
_BATCH_GROWTH = 8
_MOST_ITEMS = 4096


class Trust(IntEnum):
    """How far the answers of a remote object are believed."""

    RESULT = 0
    """A function returned the object, so the test may expect data."""
    OBJECT = 1
    """Calling a class returned the object, but the tests could also mean a function by that name.
    """
    MEMBER = 2
    """An instance of a class that the tests use as one, returned by an attribute or method of the
    program; the test may expect data there."""
    MADE = 3
    """An instance of such a class that the test itself created, by calling the class or with an
    operator."""


class ProgramLine(Protocol):
    """The part of the connection to the program that remote objects use."""

    def ask(
        self,
        of: int | str,
        do: str,
        name: str = "",
        arguments: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
        *,
        trust: Trust,
        in_place: bool = False,
        **more: Any,
    ) -> Any:
        """Have the program perform the action ``do`` on an object (by number) or on one of its
        names.
        """
        ...

    def refuse(self, reason: str) -> NoReturn:
        """End the test as failed: the program may not answer this."""
        ...


class RemoteObject:
    """Proxy for an object of the program. Each type of the program has a subclass with the
    operations that the type offers.
    """

    __slots__ = ("_ahead", "_of", "_program", "_traits", "_trust")

    def __init__(self, program: ProgramLine, of: int, traits: dict[str, Any], trust: Trust) -> None:
        ahead = _Ahead()
        for name, value in (("program", program), ("of", of), ("traits", traits), ("trust", trust)):
            object.__setattr__(self, f"_{name}", value)
        object.__setattr__(self, "_ahead", ahead)

    def __getattr__(self, name: str) -> Any:
        _check_attribute(self, name)
        own = {"own": True} if self._trust is Trust.RESULT else {}
        return self._program.ask(self._of, "get", name, trust=self._trust, **own)

    def __setattr__(self, name: str, value: Any) -> None:
        _check_attribute(self, name)
        self._program.ask(self._of, "set", name, (value,), trust=self._trust)

    def __bool__(self) -> bool:
        return _operate(self, "bool", returns=bool)

    def __str__(self) -> str:
        return _operate(self, "str", returns=str)

    def __repr__(self) -> str:
        return _operate(self, "repr", returns=str)

    def __format__(self, form: str) -> str:
        return _operate(self, "format", form, returns=str)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RemoteObject):
            _check_operands(self, other)
            return _operate(self, "eq", other, returns=bool)
        if self._traits.get("data"):
            data = self._program.ask(self._of, "data", trust=self._trust)
            if isinstance(data, RemoteObject):
                self._program.refuse(f"{_shown(self)} contains no data")
            return data == other
        if self._trust < Trust.MADE:
            self._program.refuse(f"{_shown(self)} cannot be compared with data of the test")
        return _equals_data(self, other)

    def __ne__(self, other: object) -> bool:
        # The program is not asked: it could call two objects equal and unequal.
        return not self == other

    def __hash__(self) -> int:
        if "hash" not in self._traits["offers"]:
            raise TypeError(f"unhashable type: {self._traits['type']!r}")
        return _operate(self, "hash", returns=int)

    def __copy__(self) -> Any:
        return _operate(self, "copy")

    def __deepcopy__(self, _memo: Any) -> Any:
        return _operate(self, "deepcopy")

    def __reduce_ex__(self, _protocol: Any) -> Any:
        self._program.refuse(f"{_shown(self)} cannot be pickled")


class _Ahead:
    """Items of an iterator that were fetched before the test used them."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.end: Any = False
        self.known = 0


def remote_object(program: ProgramLine, traits: dict[str, Any], trust: Trust) -> RemoteObject:
    """The proxy for an object that the program describes in ``traits``."""
    kind, offers, number = (
        str(traits["type"])[:80],
        str(traits["offers"])[:400],
        int(traits["number"]),
    )
    known = {name: traits.get(name) is True for name in ("iterator", "ahead", "data")}
    traits = {**known, "type": kind, "offers": offers.split()}
    return _kind(kind, offers)(program, number, traits, trust)


@functools.lru_cache(256)
def _kind(name: str, offers: str) -> type[RemoteObject]:
    methods = {f"__{o}__": _OFFERED[o] for o in offers.split() if o in _OFFERED}
    return type(name, (RemoteObject,), {"__slots__": (), "__module__": "solution", **methods})


def _check_attribute(remote: RemoteObject, name: str) -> None:
    if name.startswith("__"):
        if name not in _SPECIAL_ATTRIBUTES:
            raise AttributeError(f"{remote._traits['type']!r} object has no attribute {name!r}")
        return
    never = {Trust.MADE: frozenset[str](), Trust.MEMBER: _PREDICATES}.get(
        remote._trust, DATA_ATTRIBUTES
    )
    if name in never:
        remote._program.refuse(
            f"a test may not read {name!r} of {_shown(remote)}, as if it were data"
        )


def _check_operands(remote: RemoteObject, other: object) -> None:
    """Refuse an operation between a remote object and another value, unless both are the program's
    or the tests use the object as one of a class.
    """
    own = isinstance(other, RemoteObject)
    trust = max(remote._trust, other._trust) if isinstance(other, RemoteObject) else remote._trust
    if trust < (Trust.OBJECT if own else Trust.MADE):
        remote._program.refuse(f"{_shown(remote)} cannot be compared or combined with other values")


def _shown(remote: RemoteObject) -> str:
    return f"a value of type {remote._traits['type']}"


def _operate(remote: Any, name: str, *arguments: Any, returns: Any = None, **more: Any) -> Any:
    value = remote._program.ask(remote._of, "operate", name, arguments, trust=remote._trust, **more)
    if returns is not None and type(value) is not returns:
        remote._program.refuse(f"{name} of {_shown(remote)} is no {returns.__name__}")
    return value


def _observed(name: str, returns: type | None = None) -> Callable[..., Any]:
    """A method that passes nothing of the test's data to the program but perhaps a position."""

    def method(self: RemoteObject, *arguments: Any) -> Any:
        if self._trust < Trust.OBJECT:
            self._program.refuse(f"a test may not use {name} on {_shown(self)}, as if it were data")
        return _operate(self, name, *arguments, returns=returns)

    return method


def _combined(name: str, *, last: bool = False) -> Callable[..., Any]:
    """A method that combines the object with another value."""

    def method(self: RemoteObject, other: Any, *more: Any) -> Any:
        _check_operands(self, other)
        return _operate(self, name, other, *more, **({"last": True} if last else {}))

    return method


def _ordered(name: str) -> Callable[..., Any]:
    strict = name in ("lt", "gt")

    def method(self: RemoteObject, other: Any) -> bool:
        _check_operands(self, other)
        answer = _operate(self, name, other, returns=bool)
        if (
            answer
            and strict
            and self._trust < Trust.MEMBER
            and _operate(other, name, self, returns=bool)
        ):
            self._program.refuse(f"{_shown(self)} is both before and after another")
        return answer

    return method


def _contains(self: RemoteObject, item: Any) -> bool:
    if self._trust >= Trust.MADE or isinstance(item, RemoteObject):
        _check_operands(self, item)
        return _operate(self, "contains", item, returns=bool)
    if not {"iter", "getitem"}.intersection(self._traits["offers"]):
        self._program.refuse(f"a test may not look for data in {_shown(self)}")
    return any(item == mine for mine in self)  # type: ignore[attr-defined]


def _iterate(self: RemoteObject) -> Any:
    if self._trust < Trust.OBJECT and not self._traits.get("iterator"):
        self._program.refuse(f"a test may not iterate over {_shown(self)}, as if it were data")
    return _operate(self, "iter")


def _next(self: RemoteObject) -> Any:
    """The next item. For iterators of Python's own types several items are fetched at once: an
    eighth of the number already returned.
    """
    ahead = self._ahead
    if not ahead.items and ahead.end is False:
        count = max(1, ahead.known // _BATCH_GROWTH) if self._traits.get("ahead") else 1
        items, ahead.end = self._program.ask(
            self._of, "next", trust=self._trust, count=min(count, _MOST_ITEMS)
        )
        ahead.items.extend(items)
        ahead.known += len(items)
    if ahead.items:
        return ahead.items.popleft()
    end, ahead.end = ahead.end, False
    if end is True:
        raise StopIteration
    raise end


def _call(self: RemoteObject, *arguments: Any, **named: Any) -> Any:
    trust = Trust.MADE if self._traits.get("makes") else self._trust
    return self._program.ask(self._of, "call", "", arguments, named, trust=trust)


def _exit(self: RemoteObject, kind: type | None, _error: object, _trace: object) -> bool:
    """Leave a ``with`` block. Returns whether the program's manager suppresses the exception; it
    can never suppress a failed assert, and it does not see the assert's text.
    """
    mro = () if kind is None else kind.__mro__
    name = next((base.__name__ for base in mro if base.__module__ == "builtins"), None)
    handled = self._program.ask(self._of, "exit", "", (name,), trust=self._trust)
    if kind is None or not issubclass(kind, Exception) or issubclass(kind, AssertionError):
        return False
    return handled is True and self._trust >= Trust.MEMBER


def _equals_data(remote: RemoteObject, data: object) -> bool:
    """Whether the program's object equals the test's data and is different from similar data."""
    asked = family_of(data)
    equal = [other for other in asked if _operate(remote, "eq", other, returns=bool)]
    if len(equal) > 1:
        remote._program.refuse(f"{_shown(remote)} equals different data of the test")
    return bool(equal) and equal[0] is data


_OFFERED: dict[str, Callable[..., Any]] = {
    "call": _call,
    "contains": _contains,
    "delitem": _observed("delitem"),
    "enter": lambda self: _operate(self, "enter"),
    "iter": _iterate,
    "len": _observed("len", int),
    "next": _next,
    "setitem": _observed("setitem"),
    **{name: _observed(name, kind) for name, kind in (("int", int), ("float", float))},
    **{name: _observed(name, kind) for name, kind in (("index", int), ("complex", complex))},
    **{name: _observed(name) for name in _OBSERVATIONS.split()},
}
"""Special methods that not every type has: a proxy has those that the program's type defines."""


def _add_operators() -> None:
    def give(name: str, method: Callable[..., Any]) -> None:
        setattr(RemoteObject, f"__{name}__", method)

    for name in _ARITHMETIC.split():
        function = {"and": "and_", "or": "or_"}.get(name, name)
        give(name, _combined(function))
        give(f"r{name}", _combined(function, last=True))
        if name != "divmod":
            give(f"i{name}", _combined(f"i{name}"))
    for name in ("lt", "le", "gt", "ge"):
        give(name, _ordered(name))
    for name in ("neg", "pos", "abs"):
        give(name, _observed(name))
    give("invert", _observed("inv"))
    give("exit", _exit)


_add_operators()


class Stub:
    """Proxy for a function or class of the program that the tests use by its name."""

    def __init__(self, program: Callable[[], ProgramLine], name: str, trust: Trust) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_trust", trust)
        object.__setattr__(self, "_of", name)
        for key in ("__name__", "__qualname__"):
            object.__setattr__(self, key, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program().ask(self._of, "call", "", arguments, named, trust=self._trust)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _SPECIAL_ATTRIBUTES:
            raise AttributeError(f"{self._of!r} has no attribute {name!r}")
        return self._program().ask(self._of, "get", name, trust=self._trust)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program().ask(self._of, "set", name, (value,), trust=self._trust)

    def __instancecheck__(self, value: object) -> bool:
        if not isinstance(value, RemoteObject):
            return False
        asked = value._program.ask(value._of, "operate", "isinstance", (self,), trust=self._trust)
        return asked is True

    def __subclasscheck__(self, kind: object) -> bool:
        if not isinstance(kind, (Stub, RemoteObject)):
            return False
        line = self._program()
        return line.ask(kind._of, "operate", "issubclass", (self,), trust=self._trust) is True

    def __repr__(self) -> str:
        return f"<{self._of} of the program>"

    def __iter__(self) -> Iterator[Any]:
        return iter(self._program().ask(self._of, "operate", "iter", trust=self._trust))

    def __len__(self) -> int:
        return self._program().ask(self._of, "operate", "len", trust=self._trust)

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        return self._program().ask(self._of, "operate", "getitem", (key,), trust=self._trust)

    def __contains__(self, value: Any) -> bool:
        return (
            self._program().ask(self._of, "operate", "contains", (value,), trust=self._trust)
            is True
        )


def builtin_name(value: Any) -> str | None:
    """The name of a builtin function or class; None for any other value."""
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) and getattr(builtins, name, None) is value else None
