"""Handles: how a process sees the objects that stay in the other one.

Every class of the other side becomes a class here, with the same name, bases and public methods, so
that ``isinstance``, ``except`` and ``super`` work; its instances are handles. Special methods exist
where the other side's class has them. Whatever is done to a handle is asked of its owner over the
class's ``_ctrl_link`` (``connection.Connection``).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Generator
from typing import Any

from ctrl_megatron.sandbox.jail.data import IMMUTABLE

PRIVATE = "_ctrl_"
"""Beginning of the names that belong to a handle itself."""
_ASKED = """
len str repr hash int float complex index bool iter next reversed abs neg pos invert trunc floor
ceil round fspath bytes aiter anext aenter dir enter length_hint getitem setitem delitem format
class_getitem
"""
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "divmod"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_IN_PLACE = tuple(f"i{name}" for name in ARITHMETIC if name != "divmod")
_LISTED = ("__doc__", "__init__", "__post_init__")
"""Special names that a class of handles has as ordinary members."""
_OF_DATA = (*COMPARISONS, "hash", "bool", "len", "contains", "index", "int", "float")


def connection_of_handle(handle: Any) -> Any:
    return type.__getattribute__(handle if isinstance(handle, type) else type(handle), "_ctrl_link")


class RemoteAttribute:
    """An attribute of a class of the other side."""

    def __init__(self, name: str, owner: Any, method: bool) -> None:
        self.name, self.owner, self.method = name, owner, method

    def __get__(self, handle: Any, kind: Any) -> Any:
        if handle is None:
            return connection_of_handle(kind).ask("get", kind, self.name)
        link = connection_of_handle(handle)
        for one in type(handle).__mro__:
            if self.name in one.__dict__:
                if one.__dict__[self.name] is not self:
                    return link.ask("super", self.owner, self.name, handle)
                break
        if self.method:
            return BoundMethod(handle, self.name)
        return link.ask("get", handle, self.name)

    def __set__(self, handle: Any, value: Any) -> None:
        connection_of_handle(handle).ask("set", handle, self.name, value)

    def __delete__(self, handle: Any) -> None:
        connection_of_handle(handle).ask("del", handle, self.name)


class BoundMethod:
    """A method of a handle: looking it up and calling it is one question."""

    def __init__(self, handle: Any, name: str) -> None:
        self.__self__, self.__name__ = handle, name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        handle = self.__self__
        return connection_of_handle(handle).ask("method", handle, self.__name__, arguments, named)

    def __getattr__(self, name: str) -> Any:
        handle = self.__self__
        return getattr(connection_of_handle(handle).ask("get", handle, self.__name__), name)

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return self.__getattr__("__doc__")

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return types.MethodType

    def __eq__(self, other: Any) -> bool:
        same = type(other) is BoundMethod and other.__self__ is self.__self__
        return same and other.__name__ == self.__name__

    def __hash__(self) -> int:
        return hash((id(self.__self__), self.__name__))


def _call(self: Any, *arguments: Any, **named: Any) -> Any:
    return connection_of_handle(self).ask("call", self, arguments, named)


class RemoteMetaclass(type):
    """The class of all classes of handles. A class of this side that derives from one gets a mirror
    on the other side, where its instances live; their methods run here.
    """

    def __new__(cls, name: str, bases: tuple[Any, ...], names: dict[str, Any], **named: Any) -> Any:
        kept = {
            key: value for key, value in names.items() if key.startswith("__") or _is_local(value)
        }
        made = super().__new__(cls, name, bases, kept)
        link = next(
            base._ctrl_link for base in made.__mro__[1:] if isinstance(base, RemoteMetaclass)
        )
        type.__setattr__(made, "_ctrl_link", link)
        for key in names.keys() - kept.keys():
            type.__setattr__(made, key, RemoteAttribute(key, made, method=False))
        parts = {k: v for k, v in names.items() if k not in _NOT_MIRRORED}
        link.create_mirror_class(
            made, name, [base for base in bases if base is not object], parts, named
        )
        return made

    def __init__(cls, name: str, bases: tuple[Any, ...], names: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, names)

    __call__ = _call

    def __getattr__(cls, name: str) -> Any:
        if name.startswith(PRIVATE):
            raise AttributeError(name)
        return connection_of_handle(cls).ask("get", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if type(value) is RemoteAttribute:
            connection_of_handle(cls).ask("restore", cls, name)
        else:
            connection_of_handle(cls).set_class_attribute(cls, name, value)

    def __delattr__(cls, name: str) -> None:
        connection_of_handle(cls).ask("del", cls, name)

    def __instancecheck__(cls, instance: Any) -> bool:
        connection_of_handle(cls).note_class_use(cls)
        if vars(cls).get("_ctrl_abstract"):
            return connection_of_handle(cls).is_instance(instance, cls)
        return super().__instancecheck__(instance)

    @property
    def __annotations__(cls) -> Any:
        if "_ctrl_derived" in vars(cls):
            return vars(cls).get("__annotations__", {})
        return connection_of_handle(cls).ask("get", cls, "__annotations__")

    def __iter__(cls) -> Any:
        return connection_of_handle(cls).ask("op", "iter", (cls,))

    def __len__(cls) -> int:
        return connection_of_handle(cls).ask("op", "len", (cls,))

    def __bool__(cls) -> bool:
        return True

    def __getitem__(cls, key: Any) -> Any:
        return connection_of_handle(cls).ask("op", "getitem", (cls, key))

    def __contains__(cls, item: Any) -> bool:
        return connection_of_handle(cls).apply_operator("contains", cls, item)


def record_if_has_truth_value(kind: Any, special_methods: Collection[str]) -> None:
    """Store on a class of handles whether its objects define ``__bool__`` or ``__len__``,
    themselves (among ``special_methods``) or by a base, so that their truth is asked of the other
    side."""
    own = "__bool__" in special_methods or "__len__" in special_methods
    above = any(vars(base).get("_ctrl_has_truth") for base in kind.__mro__[1:])
    type.__setattr__(kind, "_ctrl_has_truth", own or above)


_NOT_MIRRORED = frozenset(
    ["__module__", "__qualname__", "__classcell__", "__dict__", "__weakref__", "__firstlineno__"]
)


_OF_EXCEPTIONS = frozenset(
    ["__traceback__", "__context__", "__cause__", "__suppress_context__", "__notes__"]
)
"""Attributes that the interpreter sets on exceptions of this side."""


def _is_local(value: Any) -> bool:
    """Whether a value of a class's namespace works on this side: a function or descriptor."""
    if issubclass(type(value), RemoteObject):
        return False
    return callable(value) or hasattr(type(value), "__get__")


class RemoteObject:
    """An object of the other side."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(PRIVATE):
            raise AttributeError(name)
        return connection_of_handle(self).ask("get", self, name)

    def __bool__(self) -> bool:
        return connection_of_handle(self).truth_value(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_EXCEPTIONS and isinstance(self, BaseException):
            object.__setattr__(self, name, value)
        else:
            connection_of_handle(self).ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        connection_of_handle(self).ask("del", self, name)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return connection_of_handle(self).ask("get", self, "__dict__")

    def __reduce_ex__(self, _protocol: Any) -> Any:
        connection_of_handle(self).raise_not_transferable(
            "an object of the other process cannot be pickled"
        )

    def __copy__(self) -> Any:
        return connection_of_handle(self).ask("op", "copy", (self,))

    def __deepcopy__(self, _memo: Any) -> Any:
        return connection_of_handle(self).ask("op", "deepcopy", (self,))

    def __dir__(self) -> Any:
        return connection_of_handle(self).ask("op", "dir", (self,))


class RemoteFunction(RemoteObject):
    """A function of the other side. ``inspect`` and ``isinstance`` take it for a function."""

    __call__ = _call

    def __get__(self, handle: Any, _kind: Any = None) -> Any:
        return self if handle is None else types.MethodType(self, handle)

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return types.FunctionType


def make_remote_function_class(link: Any) -> Any:
    names: dict[str, Any] = {
        name: property(lambda self, name=name: connection_of_handle(self).ask("get", self, name))
        for name in ("__doc__", "__module__", "__annotations__")
    }
    names |= {"_ctrl_link": link, "_ctrl_has_truth": False}
    return type("function", (RemoteFunction,), names)


class RemoteModule(types.ModuleType):
    """A module of the other side, which can be imported and patched here."""

    def __init__(self, name: str, link: Any, number: int) -> None:
        super().__init__(name)
        self.__dict__.update(_ctrl_link=link, _ctrl_number=number, __file__=f"{name}.py")

    def __getattr__(self, name: str) -> Any:
        if name.startswith(PRIVATE) or name in ("__path__", "__wrapped__"):
            raise AttributeError(name)
        return self.__dict__["_ctrl_link"].ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_ctrl_link"].ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__dict__["_ctrl_link"].ask("del", self, name)


def drive_generator(link: Any, number: Any) -> Generator[Any, Any, Any]:
    """A generator of this side that drives generator ``number`` of the other side."""
    do, value = "send", None
    while True:
        try:
            item = link.ask("generator", number, do, value)
        except StopIteration as end:
            return end.value
        try:
            do, value = "send", (yield item)
        except GeneratorExit:
            # A generator that is only forgotten is closed with the other side's, when nobody asks.
            if not link.is_abandoned_generator(number):
                link.ask("generator", number, "close", None)
            raise
        except BaseException as error:
            do, value = "throw", error


async def drive_coroutine(link: Any, number: Any) -> Any:
    """A coroutine of this side that waits for coroutine ``number`` of the other side."""
    return await _Awaiting(link, number)


class _Awaiting:
    """Waits for an awaitable of the other side: between two turns of this side's event loop the
    other side's loop has one.
    """

    def __init__(self, link: Any, number: Any) -> None:
        self._link, self._number = link, number

    def __await__(self) -> Generator[Any, Any, Any]:
        task = self._link.ask("start", self._number)
        while True:
            done = self._link.ask("turn", task)
            if done is not None:
                return done[0]
            try:
                yield
            except BaseException:
                self._link.ask("cancel", task)
                raise


# --- special methods ------------------------------------------------------------------------------


def _binary(name: str) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        return connection_of_handle(self).apply_operator(name, self, other)

    return method


def _reflected(name: str) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        return connection_of_handle(self).apply_operator(name, other, self)

    return method


def _asked(name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any) -> Any:
        return connection_of_handle(self).ask("op", name, (self, *arguments))

    return method


def _exit(self: Any, _kind: Any, error: Any, _trace: Any) -> Any:
    return connection_of_handle(self).exit_context_manager("exit", self, error)


async def _aexit(self: Any, _kind: Any, error: Any, _trace: Any) -> Any:
    return await connection_of_handle(self).exit_context_manager("aexit", self, error)


def _await(self: Any) -> Generator[Any, Any, Any]:
    return _Awaiting(connection_of_handle(self), self).__await__()


SPECIAL: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": _asked(name) for name in _ASKED.split()},
    **{f"__{name}__": _binary(name) for name in (*COMPARISONS, *ARITHMETIC, *_IN_PLACE)},
    **{f"__r{name}__": _reflected(name) for name in ARITHMETIC},
    "__contains__": _binary("contains"),
    "__call__": _call,
    "__exit__": _exit,
    "__aexit__": _aexit,
    "__await__": _await,
    "__get__": _asked("descriptor_get"),
    "__set__": _asked("descriptor_set"),
    "__delete__": _asked("descriptor_delete"),
}
"""Name -> method that a class of handles gets where the other side's class has one of that name."""


def _truth_of_data(self: Any) -> bool:
    kind = next(one for one in type(self).__mro__ if one in IMMUTABLE)
    return kind.__bool__(self) if hasattr(kind, "__bool__") else kind.__len__(self) > 0


def make_remote_class(
    link: Any,
    number: int,
    name: str,
    bases: tuple[type, ...],
    mutable: type | None,
    *,
    methods: list[str],
    members: list[str],
    special: list[str],
) -> Any:
    """The class of handles for class ``number`` of the other side."""
    names: dict[str, Any] = {one: SPECIAL[one] for one in special if one in SPECIAL}
    names.pop("__bool__", None)
    if any(issubclass(base, IMMUTABLE) for base in bases):
        # Such objects hold their data: the data's own comparisons and conversions apply.
        for one in [*names]:
            if one.strip("_") in _OF_DATA:
                del names[one]
        names["__bool__"] = _truth_of_data
    if "__eq__" in names and "__hash__" not in names:
        names["__hash__"] = None
    if mutable is not None:
        # ``isinstance`` takes its objects for such data.
        shadow = type(name, (mutable,), {})
        names |= {"__class__": property(lambda _: shadow), "_ctrl_mutable": mutable}
    made = type.__new__(RemoteMetaclass, name, bases, {**names, "__module__": "solution"})
    type.__setattr__(made, "_ctrl_link", link)
    type.__setattr__(made, "_ctrl_number", number)
    for listed, is_method in ((methods, True), (["__doc__", *members], False)):
        for one in listed:
            special_name = one.startswith("__") and one not in _LISTED
            if not one.startswith(PRIVATE) and one not in names and not special_name:
                type.__setattr__(made, one, RemoteAttribute(one, made, method=is_method))
    return made
