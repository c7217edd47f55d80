"""What stands in the judge for objects, classes and functions of the program: each operation of a
test on one of them is asked of the program.

How far the program is believed depends on what the tests can only be meant for. Where a test may
expect data, an object of the program answers nothing that would be the verdict on it: it is equal
to no data, has none of the attributes of data, and no operation tells it the test's data but calls,
attributes and items. Answers are of exact builtin types.
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
"""Not the test's own numbers."""
_OBSERVATIONS = "getitem reversed round trunc floor ceil"
_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul divmod and or xor lshift rshift"
_BATCH_GROWTH = 8
_MOST_ITEMS = 4096


class Trust(IntEnum):
    """How far an object of the program answers for itself."""

    RESULT = 0
    """A function returned it: data may be expected."""
    OBJECT = 1
    """Calling a class made it, in tests that a function could be meant by as well."""
    MEMBER = 2
    """An object of a class that the tests use as one, where an attribute or method of the program's
    brought it: data may be expected there."""
    MADE = 3
    """The same, made by the test itself: by calling the class, or with an operator."""


class ProgramLine(Protocol):
    """The line to the program, as its objects use it."""

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
        """Have the program do something with one of its objects, by number, or names."""
        ...

    def refuse(self, reason: str) -> NoReturn:
        """End the test: it asks for something that the program may not answer."""
        ...


class RemoteObject:
    """Stands for an object of the program. A subclass for each of its types has the operations that
    the type offers.
    """

    __slots__ = ("_ahead", "_of", "_program", "_told", "_trust")

    def __init__(self, program: ProgramLine, of: int, told: dict[str, Any], trust: Trust) -> None:
        ahead = _Ahead()
        for name, value in (("program", program), ("of", of), ("told", told), ("trust", trust)):
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
        if self._told.get("data"):
            data = self._program.ask(self._of, "data", trust=self._trust)
            if isinstance(data, RemoteObject):
                self._program.refuse(f"{_shown(self)} holds no data")
            return data == other
        if self._trust < Trust.MADE:
            self._program.refuse(f"{_shown(self)} cannot be compared with data of the test")
        return _equals_data(self, other)

    def __ne__(self, other: object) -> bool:
        # Not asked: a program could call objects unequal that it calls equal.
        return not self == other

    def __hash__(self) -> int:
        if "hash" not in self._told["offers"]:
            raise TypeError(f"unhashable type: {self._told['type']!r}")
        return _operate(self, "hash", returns=int)

    def __copy__(self) -> Any:
        return _operate(self, "copy")

    def __deepcopy__(self, _memo: Any) -> Any:
        return _operate(self, "deepcopy")

    def __reduce_ex__(self, _protocol: Any) -> Any:
        self._program.refuse(f"{_shown(self)} cannot be pickled")


class _Ahead:
    """Items of an iterator that came before they were asked for."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.end: Any = False
        self.known = 0


def remote_object(program: ProgramLine, told: dict[str, Any], trust: Trust) -> RemoteObject:
    """What stands for an object that the program describes."""
    kind, offers, number = str(told["type"])[:80], str(told["offers"])[:400], int(told["number"])
    known = {name: told.get(name) is True for name in ("iterator", "ahead", "data")}
    told = {**known, "type": kind, "offers": offers.split()}
    return _kind(kind, offers)(program, number, told, trust)


@functools.lru_cache(256)
def _kind(name: str, offers: str) -> type[RemoteObject]:
    methods = {f"__{o}__": _OFFERED[o] for o in offers.split() if o in _OFFERED}
    return type(name, (RemoteObject,), {"__slots__": (), "__module__": "solution", **methods})


def _check_attribute(remote: RemoteObject, name: str) -> None:
    if name.startswith("__"):
        if name not in _SPECIAL_ATTRIBUTES:
            raise AttributeError(f"{remote._told['type']!r} object has no attribute {name!r}")
        return
    never = {Trust.MADE: frozenset[str](), Trust.MEMBER: _PREDICATES}.get(
        remote._trust, DATA_ATTRIBUTES
    )
    if name in never:
        remote._program.refuse(f"a test may not ask {_shown(remote)} for {name!r}, as it does data")


def _check_operands(remote: RemoteObject, other: object) -> None:
    """The program answers for two of its own objects; the test's data it hears only where the tests
    ask for a class.
    """
    own = isinstance(other, RemoteObject)
    trust = max(remote._trust, other._trust) if isinstance(other, RemoteObject) else remote._trust
    if trust < (Trust.OBJECT if own else Trust.MADE):
        remote._program.refuse(f"{_shown(remote)} cannot be compared with or added to other values")


def _shown(remote: RemoteObject) -> str:
    return f"a value of type {remote._told['type']}"


def _operate(remote: Any, name: str, *arguments: Any, returns: Any = None, **more: Any) -> Any:
    value = remote._program.ask(remote._of, "operate", name, arguments, trust=remote._trust, **more)
    if returns is not None and type(value) is not returns:
        remote._program.refuse(f"{name} of {_shown(remote)} is no {returns.__name__}")
    return value


def _observed(name: str, returns: type | None = None) -> Callable[..., Any]:
    """An operation that tells the program nothing but perhaps a place."""

    def method(self: RemoteObject, *arguments: Any) -> Any:
        if self._trust < Trust.OBJECT:
            self._program.refuse(f"a test may not ask {_shown(self)} for {name}, as it does data")
        return _operate(self, name, *arguments, returns=returns)

    return method


def _combined(name: str, *, last: bool = False) -> Callable[..., Any]:
    """An operation with another value."""

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


def _length(self: RemoteObject) -> int:
    return _observed("len", int)(self)


def _contains(self: RemoteObject, item: Any) -> bool:
    if self._trust >= Trust.MADE or isinstance(item, RemoteObject):
        _check_operands(self, item)
        return _operate(self, "contains", item, returns=bool)
    if not {"iter", "getitem"}.intersection(self._told["offers"]):
        self._program.refuse(f"a test may not look for data in {_shown(self)}")
    return any(item == mine for mine in self)  # type: ignore[attr-defined]


def _iterate(self: RemoteObject) -> Any:
    if self._trust < Trust.OBJECT and not self._told.get("iterator"):
        self._program.refuse(f"a test may not iterate over {_shown(self)}, as it does over data")
    return _operate(self, "iter")


def _next(self: RemoteObject) -> Any:
    """The next item. Iterators of Python's own are asked for more than one later on: for an eighth
    of what they have yielded.
    """
    ahead = self._ahead
    if not ahead.items and ahead.end is False:
        count = max(1, ahead.known // _BATCH_GROWTH) if self._told.get("ahead") else 1
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
    trust = Trust.MADE if self._told.get("makes") else self._trust
    return self._program.ask(self._of, "call", "", arguments, named, trust=trust)


def _set_item(self: RemoteObject, key: Any, value: Any) -> None:
    _observed("setitem")(self, key, value)


def _delete_item(self: RemoteObject, key: Any) -> None:
    _observed("delitem")(self, key)


def _enter(self: RemoteObject) -> Any:
    return _operate(self, "enter")


def _exit(self: RemoteObject, kind: type | None, _error: object, _trace: object) -> bool:
    """Whether the program's manager takes care of an exception; a failed assert it never does, nor
    does it hear what was expected.
    """
    mro = () if kind is None else kind.__mro__
    name = next((base.__name__ for base in mro if base.__module__ == "builtins"), None)
    handled = self._program.ask(self._of, "exit", "", (name,), trust=self._trust)
    if kind is None or not issubclass(kind, Exception) or issubclass(kind, AssertionError):
        return False
    return handled is True and self._trust >= Trust.MEMBER


def _equals_data(remote: RemoteObject, data: object) -> bool:
    """Whether the program calls its object equal to the test's data, which it has to tell from what
    is like it.
    """
    asked = family_of(data)
    equal = [other for other in asked if _operate(remote, "eq", other, returns=bool)]
    if len(equal) > 1:
        remote._program.refuse(f"{_shown(remote)} is equal to different data of the test")
    return bool(equal) and equal[0] is data


_OFFERED: dict[str, Callable[..., Any]] = {
    "call": _call,
    "contains": _contains,
    "delitem": _delete_item,
    "enter": _enter,
    "iter": _iterate,
    "len": _length,
    "next": _next,
    "setitem": _set_item,
    **{name: _observed(name, kind) for name, kind in (("int", int), ("float", float))},
    **{name: _observed(name, kind) for name, kind in (("index", int), ("complex", complex))},
    **{name: _observed(name) for name in _OBSERVATIONS.split()},
}
"""Methods that a type of the program may lack."""


def _add_operators() -> None:
    def give(name: str, method: Callable[..., Any]) -> None:
        setattr(RemoteObject, f"__{name}__", method)

    for name in [
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "matmul",
        "divmod",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    ]:
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
    """Stands for what the program has under a name of the tests: a function, or a class."""

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
    """The name of a function or class of Python's own, None for any other value."""
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) and getattr(builtins, name, None) is value else None
