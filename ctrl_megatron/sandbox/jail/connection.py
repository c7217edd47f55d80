"""The connection between judge and program, the same on both sides.

Immutable data is copied. Lists, dicts and the like (``data.MUTABLE``) have a copy and one identity
on both sides: a message carries the content of those that changed since the last one. Every other
object stays where it was made, and the other side gets a handle (``handles``). Questions
(``ask``) may be nested: while a side waits for an answer, it answers what the other side asks.
"""

from __future__ import annotations

import abc
import builtins
import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, NoReturn

from ctrl_megatron.sandbox.jail import data, frames, handles
from ctrl_megatron.sandbox.jail.data import DataError
from ctrl_megatron.sandbox.jail.originals import Originals

ENDINGS = (StopIteration, StopAsyncIteration, GeneratorExit)
_EXCEPTIONS: dict[str, type[BaseException]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
_NAMED_BUILTINS = frozenset(
    [
        *("abs", "all", "any", "ascii", "bin", "bool", "bytearray", "bytes", "callable", "chr"),
        *("classmethod", "complex", "dict", "divmod", "enumerate", "filter", "float", "format"),
        *("frozenset", "hash", "hex", "id", "int", "isinstance", "issubclass", "iter", "len"),
        *("list", "map", "max", "min", "next", "object", "oct", "ord", "pow", "print"),
        *("property", "range", "repr", "reversed", "round", "set", "slice", "sorted"),
        *("staticmethod", "str", "sum", "super", "tuple", "type", "zip"),
    ]
)
"""Builtin functions that either side may name to the other."""
_WITH_EXCEPTIONS = frozenset(
    [
        *("argparse", "asyncio.exceptions", "asyncio.queues", "binascii", "configparser", "copy"),
        *("concurrent.futures._base", "_csv", "dataclasses", "decimal", "_io", "io", "_queue"),
        *("json.decoder", "queue", "re", "re._constants", "_struct", "struct", "shutil", "socket"),
        *("sqlite3", "statistics", "string", "subprocess", "unittest.case", "urllib.error"),
        *("xml.etree.ElementTree", "zipfile", "tarfile", "zlib", "lzma", "enum", "graphlib"),
    ]
)
"""Modules of Python whose exceptions are copied; importing them does nothing."""
_DEEPEST_CAUSE = 5
_MOST_NAMES = 2000
_REASON = 500
_LOOP_SECONDS = 0.001
_FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType, classmethod, staticmethod),
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType, types.WrapperDescriptorType),
)
_LISTED = ("__init__", "__post_init__")


class PeerError(Exception):
    """A message of the other side is malformed."""


class RequestForbidden(Exception):
    """A question that the other side may not ask. Nothing was done."""


# --- operations that a side performs on its objects for the other ---------------------------------


def _leave(manager: Any, error: BaseException | None) -> Any:
    kind = None if error is None else type(error)
    return type(manager).__exit__(manager, kind, error, error and error.__traceback__)


def _leave_async(manager: Any, error: BaseException | None) -> Any:
    kind = None if error is None else type(error)
    return type(manager).__aexit__(manager, kind, error, error and error.__traceback__)


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(builtins, name)
        for name in (
            *("len", "str", "repr", "hash", "int", "float", "complex", "iter", "next", "bool"),
            *("reversed", "round", "format", "divmod", "dir", "aiter", "anext", "bytes", "abs"),
        )
    },
    **{
        name: getattr(operator, name, None) or getattr(operator, f"{name}_")
        for name in (
            *("eq", "ne", "lt", "le", "gt", "ge", "contains", "getitem", "setitem", "delitem"),
            *("neg", "pos", "invert", "index", "length_hint"),
            *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or"),
            *("xor", "lshift", "rshift", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod"),
            *("ipow", "imatmul", "iand", "ior", "ixor", "ilshift", "irshift"),
        )
    },
    **{"trunc": math.trunc, "floor": math.floor, "ceil": math.ceil},
    **{"copy": copy.copy, "deepcopy": copy.deepcopy, "fspath": os.fspath},
    "enter": lambda manager: type(manager).__enter__(manager),
    "aenter": lambda manager: type(manager).__aenter__(manager),
    "exit": _leave,
    "aexit": _leave_async,
    "class_getitem": lambda kind, item: kind[item],
    "isinstance": isinstance,
    "weakref": weakref.ref,
    "descriptor_get": lambda found, handle, kind=None: type(found).__get__(found, handle, kind),
    "descriptor_set": lambda found, handle, value: type(found).__set__(found, handle, value),
    "descriptor_delete": lambda found, handle: type(found).__delete__(found, handle),
    "asdict": dataclasses.asdict,
    "astuple": dataclasses.astuple,
    "fields": dataclasses.fields,
    "is_dataclass": dataclasses.is_dataclass,
    "replace": lambda record, changes: dataclasses.replace(record, **dict(changes)),
}
"""Bound before the program runs, because the program may replace anything in a module."""


class Connection:
    """One end of the connection; ``first`` is the first number of the containers that this side
    makes (the other side's have the other parity).
    """

    def __init__(self, fd: int, *, first: int, limit: int) -> None:
        self._fd = fd
        self._frames = frames.FrameReader(fd, limit=limit)
        self._questions = itertools.count(1)
        self._answers: dict[int, Any] = {}
        self._awaited: set[int] = set()
        self._reading = False
        self._turn = threading.Condition()
        self._sending = threading.RLock()
        self._inside = 0
        """Messages that are being written or read."""
        self._threads = False
        """Whether more than one thread has asked."""
        self._thread = threading.get_ident()
        self._numbers = itertools.count(1)
        self._own: dict[int, Any] = {}
        self._own_numbers: dict[int, int] = {}
        self._foreign: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._classes: dict[int, Any] = {}
        self._aliases: dict[int, int] = {}
        self._released: list[int] = []
        self._forgotten: set[int] = set()
        self._new: list[Any] = []
        self._news: dict[int, Any] = {}
        self._container_numbers = itertools.count(first, 2)
        self._shared: dict[int, Any] = {}
        self._shared_numbers: dict[int, int] = {}
        self._snapshots: dict[int, Any] = {}
        self._queue: list[int] = []
        self._filling: set[int] = set()
        self._originals = Originals()
        self._loop: Any = None
        self.effects: Callable[[], list[Any]] = list
        """Effects of this side on the surroundings of both since the last message."""
        self.apply_effects: Callable[[list[Any]], None] = lambda _effects: None

    # --- what a side allows; the judge overrides it -----------------------------------------------

    def require_permitted(self, do: str, parts: list[Any]) -> None:
        """Raise ``RequestForbidden`` for a question that the other side may not ask."""

    def is_entry(self, _kind: type) -> bool:
        """Whether a class of this side is an entry point of the problem."""
        return False

    def apply_operator(self, name: str, left: Any, right: Any) -> Any:
        """The result of the binary operator ``name`` on ``left`` and ``right``, of which one is a
        handle."""
        return self.ask("op", name, (left, right))

    def truth_value(self, handle: Any) -> bool:
        """The truth value of ``handle``: the other side's if its class has one
        (``record_if_has_truth_value``), else True."""
        if not vars(type(handle))["_ctrl_has_truth"]:
            return True
        return self.ask("op", "bool", (handle,))

    def is_instance(self, instance: Any, kind: Any) -> bool:
        """Whether an abstract class of the other side takes an object for its instance."""
        return self.ask("op", "isinstance", (instance, kind)) is True

    def exit_context_manager(self, name: str, manager: Any, error: Any) -> Any:
        """Have the other side end a ``with`` block whose context manager ``manager`` is; ``error``
        is the exception of the block or None."""
        return self.ask("op", name, (manager, error))

    def note_class_use(self, _kind: Any) -> None:
        """Hook: a class of the other side was subclassed or used in isinstance; nothing here."""

    def raise_not_transferable(self, reason: str) -> NoReturn:
        """Raise the error for a value that cannot cross the connection; ``reason`` says why."""
        raise TypeError(reason)

    def call_failed(self, error: BaseException) -> None:
        """Hook: a question of the other side raised ``error``, which it is told next."""

    # --- questions --------------------------------------------------------------------------------

    def ask(self, do: str, *parts: Any) -> Any:
        """Have the other side perform the action ``do``; returns its result or raises its
        exception.
        """
        frame = self._ask(do, parts)
        if "error" in frame:
            raise frame["error"]
        if "refused" in frame:
            self.raise_not_transferable(str(frame["refused"])[:_REASON])
        return frame["value"]

    def _ask(self, do: str, parts: tuple[Any, ...]) -> dict[str, Any]:
        with self._sending, self._within():
            number = next(self._questions)
            main = threading.get_ident() == self._thread
            self._threads |= not main
            named: dict[str, Any] = {}
            if do in ("call", "method"):
                named = parts[-1]
                parts = parts[:-1]
            head: dict[str, Any] = {
                "q": number,
                "do": do,
                "p": [self.encode(part) for part in parts],
            }
            if named:
                head["k"] = {name: self.encode(value) for name, value in named.items()}
            if not main:
                head["t"] = 1
            # Before it is sent: another thread may read the answer first.
            self._awaited.add(number)
            self._send(head)
        return self._wait(number)

    def _wait(self, number: int) -> dict[str, Any]:
        """Wait for an answer; questions that arrive before it are answered."""
        self._awaited.add(number)
        try:
            while True:
                frame = self._next(number)
                if "q" in frame:
                    self._answer(frame)
                    continue
                if frame.get("a") != number:
                    raise PeerError("an answer to no question")
                return frame
        finally:
            self._awaited.discard(number)

    def _next(self, number: int) -> dict[str, Any]:
        """The next frame for the caller: the answer to question ``number``, or a question."""
        frame = self._next_unopened(number)
        with self._within():
            # Decoding may ask, for example for the hash of a key.
            self._open(frame)
        return frame

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def _next_unopened(self, number: int) -> dict[str, Any]:
        while True:
            with self._turn:
                if number in self._answers:
                    return self._answers.pop(number)
                if self._reading:
                    self._turn.wait()
                    continue
                self._reading = True
            try:
                frame = self._receive()
            finally:
                with self._turn:
                    self._reading = False
                    self._turn.notify_all()
            answered = frame.get("a")
            if answered is None or answered == number or answered not in self._awaited:
                return frame
            with self._turn:
                self._answers[answered] = frame
                self._turn.notify_all()

    def _receive(self) -> dict[str, Any]:
        frame = self._frames.receive()
        if type(frame) is not dict:
            raise PeerError("a message of another shape")
        return frame

    def _answer(self, frame: dict[str, Any]) -> None:
        """Perform what the other side asks, and send the result."""
        answer: dict[str, Any] = {"a": frame.get("q")}
        try:
            parts, named = frame["parts"], frame["named"]
            value = self._do(str(frame.get("do")), parts, named)
        except RequestForbidden as error:
            answer["refused"] = str(error)
        except BaseException as error:
            self.call_failed(error)
            answer |= self._error(error)
        else:
            try:
                with self._sending, self._within():
                    answer["value"] = self.encode(value)
                    self._send(answer)
                return
            except (DataError, RecursionError, RequestForbidden) as error:
                answer = {"a": answer["a"], "refused": f"{error}"}
        with self._sending:
            self._send(answer)

    def serve(self) -> NoReturn:
        """Answer questions for ever. Once a thread of the other side asks, every question is
        answered in a thread of its own.
        """
        apart = False
        while True:
            frame = self._next(0)
            apart |= "t" in frame
            self._threads |= apart
            if "q" not in frame:
                raise PeerError("an answer to no question")
            if apart:
                threading.Thread(target=self._answer, args=(frame,), daemon=True).start()
            else:
                self._answer(frame)

    def _do(self, do: str, parts: list[Any], named: dict[str, Any]) -> Any:
        self.require_permitted(do, parts)
        if do == "method":
            target, name, arguments = parts
            return getattr(target, name)(*arguments, **named)
        if do == "call":
            target, arguments = parts
            return target(*arguments, **named)
        if do == "op":
            name, arguments = parts
            return OPERATIONS[name](*arguments)
        if do == "get":
            return _attribute(*parts)
        action = getattr(self, f"_do_{do}", None)
        if action is None:
            raise RequestForbidden(f"no such action: {do[:40]}")
        return action(*parts)

    def _do_set(self, target: Any, name: str, value: Any) -> None:
        if isinstance(target, (type, types.ModuleType)):
            self._originals.keep_attribute(target, name)
        setattr(target, name, value)

    def _do_setmember(self, target: Any, name: str, part: Any) -> None:
        self._do_set(target, name, _member(part))

    def _do_restore(self, target: Any, name: str) -> None:
        self._originals.restore_attribute(target, name)

    def _do_del(self, target: Any, name: str) -> None:
        delattr(target, name)

    def _do_data(self, target: Any) -> Any:
        return data_base_value(target)

    def _do_super(self, kind: Any, name: str, handle: Any) -> Any:
        for one in kind.__mro__:
            if name in one.__dict__:
                found = one.__dict__[name]
                get = getattr(type(found), "__get__", None)
                return found if get is None else get(found, handle, type(handle))
        return getattr(object, name).__get__(handle)

    def _do_derive(
        self, name: str, bases: tuple[Any, ...], parts: tuple[Any, ...], named: tuple[Any, ...]
    ) -> Any:
        members = {key: _member(part) for key, part in parts}
        made = types.new_class(name, bases, dict(named), lambda space: space.update(members))
        return self._own_number(made)

    def _do_generator(self, target: Any, do: str, value: Any) -> Any:
        return target.close() if do == "close" else getattr(target, do)(value)

    def _do_start(self, awaitable: Any) -> Any:
        import asyncio  # only where a coroutine crosses: it would double the memory to fork

        return StartedAwaitable(asyncio.ensure_future(awaitable, loop=self._event_loop()))

    def _do_turn(self, started: Any) -> Any:
        loop, task = self._event_loop(), started.task
        if not task.done() and not loop.is_running():
            loop.call_later(_LOOP_SECONDS, loop.stop)
            task.add_done_callback(lambda _: loop.stop())
            loop.run_forever()
        return (task.result(),) if task.done() else None

    def _do_cancel(self, started: Any) -> None:
        started.task.cancel()

    def _event_loop(self) -> Any:
        import asyncio

        try:
            return asyncio.get_running_loop()
        except RuntimeError:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            return self._loop

    def create_mirror_class(
        self, made: Any, name: str, bases: list[Any], parts: dict[str, Any], named: dict[str, Any]
    ) -> None:
        """Give a class of this side that derives from one of the other side its mirror there."""
        listed = tuple((key, _member_parts(value)) for key, value in parts.items())
        number = self.ask("derive", name, tuple(bases), listed, tuple(named.items()))
        if type(number) is not int:
            raise PeerError("a class without a number")
        type.__setattr__(made, "_ctrl_number", number)
        type.__setattr__(made, "_ctrl_derived", True)
        handles.record_if_has_truth_value(made, parts)
        self._classes[number] = made
        self.note_class_use(made)

    def set_class_attribute(self, kind: Any, name: str, value: Any) -> None:
        """Set an attribute of a class of the other side."""
        if "_ctrl_derived" in vars(kind):
            type.__setattr__(kind, name, value)
            if name.startswith("__") and not callable(value):
                return
        self.ask("setmember", kind, name, _member_parts(value))

    # --- sending ----------------------------------------------------------------------------------

    def encode(self, value: Any) -> Any:
        """The JSON-ready form of a value for this connection."""
        return data.encode_value(value, self._encode_other)

    def _encode_other(self, value: Any) -> Any:
        kind = type(value)
        if kind in data.MUTABLE:
            return ["ref", self._container_number(value)]
        if issubclass(kind, (handles.RemoteObject, handles.RemoteMetaclass, handles.RemoteModule)):
            return self._encode_handle(value)
        if kind is ForeignObjectNumber:
            return ["yours", value.number]
        if kind is handles.BoundMethod:
            return ["bound", self._encode_handle(value.__self__), value.__name__]
        if id(value) in self._aliases:
            return ["yours", self._aliases[id(value)]]
        if isinstance(value, BaseException) and library_exception(kind):
            return self._encode_exception(value, 0)
        if (
            isinstance(value, type)
            and issubclass(value, BaseException)
            and library_exception(value)
        ):
            return ["error", value.__module__, value.__qualname__]
        if (name := self.library_name(value)) is not None:
            return ["name", *name]
        if self._is_plain_data(kind):
            return self.encode(data_base_value(value))
        if kind in (types.FrameType, types.TracebackType):
            raise RequestForbidden(f"a {kind.__name__} cannot be passed")
        return ["mine", self._own_number(value)]

    def _encode_handle(self, value: Any) -> Any:
        found = value.__dict__ if type(value) is handles.RemoteModule else None
        link = handles.connection_of_handle(value) if found is None else found["_ctrl_link"]
        if link is not self:
            self.raise_not_transferable(
                "an object of the program no longer exists: the program was restarted"
            )
        return ["yours", value._ctrl_number if found is None else found["_ctrl_number"]]

    def _is_plain_data(self, kind: type) -> bool:
        """Whether objects of a class that derives from a data type are no more than data."""
        base = data_base_type(kind)
        if base is None or issubclass(kind, Enum) or self.is_entry(kind):
            return False
        between = itertools.takewhile(lambda one: one is not base, kind.__mro__)
        return all(
            name.startswith("_") for one in between for name in vars(one) if one is not object
        )

    def library_name(self, value: Any) -> tuple[str, str] | None:
        """Module and name under which both sides have a function, class or module."""
        if type(value) is types.ModuleType and sys.modules.get(value.__name__) is value:
            root = value.__name__.partition(".")[0]
            return (value.__name__, "") if root in sys.stdlib_module_names else None
        name = getattr(value, "__name__", None) if callable(value) else None
        if type(name) is str and name in _NAMED_BUILTINS and getattr(builtins, name) is value:
            return "builtins", name
        return None

    def _own_number(self, value: Any) -> int:
        number = self._own_numbers.get(id(value))
        if number is None:
            number = next(self._numbers)
            self._own[number], self._own_numbers[id(value)] = value, number
            self._new.append([number, self._describe(value)])
        return number

    def _describe(self, value: Any) -> Any:
        """The facts about an object from which the other side makes a handle."""
        kind = type(value)
        if isinstance(value, type):
            return self._describe_class(value)
        if kind is types.FunctionType:
            return {"kind": "function", "name": value.__name__[:80]}
        if kind in (types.GeneratorType, types.CoroutineType):
            return {"kind": kind.__name__}
        if kind is types.ModuleType:
            return {"kind": "module", "name": value.__name__[:80]}
        described: dict[str, Any] = {"class": self._own_number(kind)}
        base = data_base_type(kind)
        if base in data.IMMUTABLE:
            described["data"] = data.encode_value(data_base_value(value), self._encode_other)
        if _watched(value):
            described["watched"] = True
        if isinstance(value, BaseException):
            described["args"] = [self.encode(argument) for argument in value.args]
        return described

    def _describe_class(self, kind: Any) -> dict[str, Any]:
        names = [name for name in [*vars(kind)][:_MOST_NAMES] if type(name) is str]
        listed = [n for n in names if not n.startswith("__") or n in _LISTED]
        methods = [n for n in listed if isinstance(vars(kind)[n], _FUNCTIONS)]
        special = [n for n in names if n in handles.SPECIAL and vars(kind)[n] is not None]
        return {
            "kind": "class",
            "name": kind.__name__[:80],
            "bases": [self._base(base) for base in kind.__bases__ if base is not object],
            "methods": methods,
            "members": [n for n in listed if n not in methods],
            "special": [] if kind is object else special,
            "mutable": data.MUTABLE.get(kind),
            "abstract": isinstance(kind, abc.ABCMeta),
        }

    def _base(self, base: Any) -> Any:
        if base in data.IMMUTABLE:
            return ["type", f"{base.__module__}.{base.__qualname__}"]
        if issubclass(base, BaseException) and library_exception(base):
            return ["error", base.__module__, base.__qualname__]
        return ["mine", self._own_number(base)]

    def _encode_exception(self, error: BaseException, depth: int) -> Any:
        def near(other: BaseException | None) -> Any:
            if other is None or depth >= _DEEPEST_CAUSE:
                return None
            if library_exception(type(other)):
                return self._encode_exception(other, depth + 1)
            return self.encode(other)

        kind = type(error)
        state = {k: v for k, v in vars(error).items() if k not in ("__notes__",)}
        return [
            "exception",
            kind.__module__,
            kind.__qualname__,
            [self.encode(argument) for argument in error.args],
            near(error.__cause__),
            None if error.__suppress_context__ else near(error.__context__),
            [[name, self.encode(value)] for name, value in state.items()],
            [str(note) for note in getattr(error, "__notes__", ())],
        ]

    def _error(self, error: BaseException) -> dict[str, Any]:
        """The fields of an answer that tell an exception."""
        line, trace = None, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "solution.py":
                line = trace.tb_lineno
            trace = trace.tb_next
        if isinstance(error, SyntaxError):
            line = error.lineno
        try:
            only = error.args[0] if len(error.args) == 1 else None
            text = (only if type(only) is str else str(error))[:_REASON]
        except BaseException:
            text = ""
        told: dict[str, Any] = {"type": type(error).__name__[:80], "text": text, "line": line}
        if not isinstance(error, Exception) and type(error).__name__ == "HarnessFailure":
            return {"refused": text}
        try:
            cause = error.__cause__
            told["error"] = self.encode(error)
            if told["error"][0] == "mine" and cause is not None:
                told["cause"] = self.encode(cause)
        except BaseException:
            told["error"] = [
                *("exception", "builtins", "RuntimeError", [f"{told['type']}: {text}"]),
                *(None, None, [], []),
            ]
        return told

    def _container_number(self, container: Any) -> int:
        number = self._shared_numbers.get(id(container))
        if number is None:
            number = next(self._container_numbers)
            self._share(number, container)
            self._queue.append(number)
        return number

    def _share(self, number: int, container: Any) -> None:
        self._shared[number], self._shared_numbers[id(container)] = container, number

    def _send(self, head: dict[str, Any]) -> None:
        """Send a frame with what changed since the last one."""
        if effects := self.effects():
            head["e"] = effects
        if self._shared:
            gone = self._look_at_shared()
            contents = []
            while self._queue:
                number = self._queue.pop()
                container = self._shared[number]
                contents.append([number, data.encode_contents(container, self.encode)])
                self._snapshots[number] = data.container_state(container)
            if contents:
                head["c"] = contents
            if gone:
                head["g"] = gone
        if self._new:
            head["n"] = [*self._new]
            self._new.clear()
        if self._released and not self._threads:
            released, self._released = self._released, []
            head["f"] = [n for n in released if n not in self._foreign]
            for number in head["f"]:
                self._news.pop(number, None)
                self._forgotten.discard(number)
        self._write(head)

    def _write(self, head: dict[str, Any]) -> None:
        frames.send(self._fd, head)

    def _look_at_shared(self) -> list[int]:
        """Queue the containers that changed. Returns those that only this table still holds."""
        gone = []
        queued = set(self._queue)
        references = sys.getrefcount
        for number, container in [*self._shared.items()]:
            if number in queued or number in self._filling:
                continue
            if data.is_changed(container, self._snapshots[number]):
                self._queue.append(number)
            # Held by the table, the list of its items, this variable and the argument.
            elif references(container) <= 4 and not self._threads:
                gone.append(number)
        for number in gone:
            self._forget_container(number)
        return gone

    def _forget_container(self, number: int) -> None:
        container = self._shared.pop(number, None)
        if container is not None:
            self._shared_numbers.pop(id(container), None)
            self._snapshots.pop(number, None)

    # --- receiving --------------------------------------------------------------------------------

    def _open(self, frame: dict[str, Any]) -> None:
        """Take over what a frame carries, and decode its values."""
        try:
            for number, described in frame.pop("n", ()):
                self._news[int(number)] = described
            if "c" in frame:
                self._take_contents(frame.pop("c"))
            for number in frame.pop("g", ()):
                self._forget_container(number)
            if "e" in frame:
                self.apply_effects(frame.pop("e"))
            if "q" in frame:
                frame["parts"] = [self.decode(part) for part in frame.pop("p")]
                named = frame.pop("k", {})
                frame["named"] = {str(name): self.decode(v) for name, v in named.items()}
            elif "value" in frame:
                frame["value"] = self.decode(frame["value"])
            elif "error" in frame:
                frame["error"] = self._decoded_error(frame["error"], frame.get("cause"))
            # Last, because the message itself may name what its sender holds no more.
            for number in frame.pop("f", ()):
                value = self._own.pop(number, None)
                self._own_numbers.pop(id(value), None)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise PeerError(f"a malformed message: {error}") from error

    def _take_contents(self, contents: list[Any]) -> None:
        numbers = []
        for number, content in contents:
            if type(number) is not int:
                raise DataError("a container without a number")
            if number not in self._shared:
                self._share(number, data.empty_container(content))
            numbers.append(number)
        self._filling.update(numbers)
        try:
            for number, content in contents:
                data.fill_container(self.changed_container(number), content, self.decode)
                self._snapshots[number] = data.container_state(self._shared[number])
        finally:
            self._filling.difference_update(numbers)

    def changed_container(self, number: int) -> Any:
        """The container whose new content arrived."""
        return self._shared[number]

    def decode(self, encoded: Any) -> Any:
        """The value that ``encode_value`` wrote on the other side. Raises ``DataError``."""
        return data.decode_value(encoded, self._decode_other)

    def _decode_other(self, encoded: list[Any]) -> Any:
        tag, *rest = encoded
        if tag == "ref":
            return self._shared[rest[0]]
        if tag == "yours":
            return self._own[rest[0]]
        if tag == "mine":
            return self._handle(rest[0])
        if tag == "exception":
            return self._decode_exception(rest)
        if tag == "error":
            return exception_named(str(rest[0]), str(rest[1]))
        if tag == "bound":
            return self.bound_method(self.decode(rest[0]), str(rest[1]))
        if tag == "name":
            return self.library_object(str(rest[0]), str(rest[1]))
        raise DataError(f"unknown tag {tag[:20]!r}")

    def bound_method(self, target: Any, name: str) -> Any:
        """The method of an object of this side that the other side names."""
        return getattr(target, name)

    def library_object(self, module: str, name: str) -> Any:
        """The library's function, class or module that the other side names."""
        if module == "builtins" and name in _NAMED_BUILTINS:
            return getattr(builtins, name)
        own = module.partition(".")[0] in sys.stdlib_module_names
        if not name and own and module in sys.modules:
            return sys.modules[module]
        raise DataError(f"a name that is not known here: {module[:40]}.{name[:40]}")

    def _handle(self, number: int) -> Any:
        found = self._classes.get(number)
        if found is None:
            found = self._foreign.get(number)
        if found is not None:
            return found
        described = self._news.get(number)
        if described is None:
            raise DataError("an object without a description")
        kind = described.get("kind")
        if kind == "class":
            return self._handle_of_class(number, described)
        if kind in ("generator", "coroutine"):
            return self._driven(number, kind)
        if kind == "module":
            made: Any = handles.RemoteModule(str(described["name"]), self, number)
        elif kind == "function":
            made = handles.RemoteFunction.__new__(self._function_class)
            object.__setattr__(made, "_ctrl_number", number)
            object.__setattr__(made, "__name__", str(described["name"]))
        else:
            made = self._instance(self._handle(described["class"]), described)
            object.__setattr__(made, "_ctrl_number", number)
        self._keep(number, made, described.get("watched") is True)
        return made

    def _keep(self, number: int, made: Any, watched: bool) -> None:
        try:
            self._foreign[number] = made
            weakref.finalize(made, self._release, number, watched).atexit = False
        except TypeError:
            # Objects that hold data of variable size cannot be referred to weakly.
            self._classes[number] = made

    def _release(self, number: int, watched: bool) -> None:
        self._released.append(number)
        if watched and self._inside == 0 and not self._threads:
            # Its owner does something when the last reference goes.
            self.ask("nothing")

    def _do_nothing(self) -> None:
        pass

    def is_abandoned_generator(self, handle: Any) -> bool:
        """Whether nobody on this side holds the generator that drives ``handle``."""
        return handle.number in self._forgotten

    def _instance(self, kind: Any, described: dict[str, Any]) -> Any:
        if type(kind) is not handles.RemoteMetaclass:
            raise DataError("an object of no class")
        base = data_base_type(kind)
        if issubclass(kind, BaseException):
            arguments = [self.decode(one) for one in described.get("args", ())]
            maker: Any = next(one for one in kind.__mro__ if _EXCEPTIONS.get(one.__name__) is one)
            made = maker.__new__(kind, *arguments)
            object.__setattr__(made, "args", tuple(arguments))
            return made
        if base in data.IMMUTABLE:
            return base.__new__(kind, self.decode(described["data"]))  # type: ignore[union-attr]
        return object.__new__(kind)

    def _handle_of_class(self, number: int, described: dict[str, Any]) -> Any:
        bases = tuple(self.decode(base) for base in described["bases"])
        if not any(isinstance(base, handles.RemoteMetaclass) for base in bases):
            bases = (handles.RemoteObject, *bases)
        named = {
            key: [str(name) for name in described[key][:_MOST_NAMES]]
            for key in ("methods", "members", "special")
        }
        name = str(described["name"])
        mutable = data.KINDS.get(str(described.get("mutable"))) or _mutable_base(bases)
        made = handles.make_remote_class(self, number, name, bases, mutable, **named)
        handles.record_if_has_truth_value(made, named["special"])
        type.__setattr__(made, "_ctrl_abstract", described.get("abstract") is True)
        self._classes[number] = made
        return made

    @functools.cached_property
    def _function_class(self) -> Any:
        return handles.make_remote_function_class(self)

    def _driven(self, number: int, kind: str) -> Any:
        """A generator or coroutine of this side for one of the other side."""
        drive: Any = handles.drive_generator if kind == "generator" else handles.drive_coroutine
        made = drive(self, ForeignObjectNumber(number))
        self._aliases[id(made)] = number
        self._foreign[number] = made
        weakref.finalize(made, self._end_driven, id(made), number).atexit = False
        return made

    def _end_driven(self, identity: int, number: int) -> None:
        self._aliases.pop(identity, None)
        self._forgotten.add(number)
        self._released.append(number)

    def _decode_exception(self, rest: list[Any]) -> BaseException:
        module, name, arguments, cause, context, state, notes = rest
        kind = exception_named(str(module), str(name))
        decoded = [self.decode(one) for one in arguments]
        if issubclass(kind, BaseExceptionGroup):
            error: BaseException = kind(*decoded)
        else:
            error = kind.__new__(kind, *decoded)
            error.args = tuple(decoded)
            for key, value in state:
                found = self.decode(value)
                # A function would act as a method of the exception.
                if not str(key).startswith("__") and not callable(found):
                    setattr(error, str(key), found)
            if kind.__module__ == "builtins":
                error.__init__(*decoded)  # type: ignore[misc]
        for note in notes:
            error.add_note(str(note))
        if cause is not None:
            error.__cause__ = self._near(cause)
        if context is not None:
            error.__context__ = self._near(context)
        return error

    def _near(self, encoded: Any) -> BaseException | None:
        found = self.decode(encoded)
        return found if isinstance(found, BaseException) else None

    def _decoded_error(self, encoded: Any, cause: Any) -> BaseException:
        error = self.decode(encoded)
        if not isinstance(error, BaseException):
            raise DataError("an exception that is none")
        if cause is not None:
            error.__cause__ = self._near(cause)
        return error


def library_exception(kind: type) -> bool:
    """Whether an exception's class is one of Python's own, which both sides have."""
    if _EXCEPTIONS.get(kind.__name__) is kind:
        return True
    if kind.__module__ not in _WITH_EXCEPTIONS:
        return False
    return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind


def exception_named(module: str, name: str) -> type[BaseException]:
    """One of Python's own classes of exceptions. Raises ``DataError``."""
    found: Any = _EXCEPTIONS.get(name)
    if module != "builtins":
        if module not in _WITH_EXCEPTIONS:
            raise DataError(f"an exception of no known module: {module[:40]}")
        found = getattr(importlib.import_module(module), name, None)
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        raise DataError(f"no exception of Python: {module[:40]}.{name[:40]}")
    return found


class StartedAwaitable:
    """An awaitable of this side for whose result the other side waits."""

    def __init__(self, task: Any) -> None:
        self.task = task


class ForeignObjectNumber:
    """The number of an object of the other side that has no handle here."""

    def __init__(self, number: int) -> None:
        self.number = number


def _watched(value: Any) -> bool:
    """Whether something happens when an object of this side is deleted."""
    return weakref.getweakrefcount(value) > 0 or hasattr(type(value), "__del__")


def _mutable_base(bases: Iterable[Any]) -> Any:
    found = (getattr(base, "_ctrl_mutable", None) for base in bases if type(base) is not type)
    return next(filter(None, found), None)


def _attribute(target: Any, name: str) -> Any:
    if name == "__signature__":
        return inspect.signature(target)
    return getattr(target, name)


def _member_parts(value: Any) -> tuple[Any, ...]:
    """A value of a class's namespace, taken apart so that it can be sent."""
    if isinstance(value, property):
        return "property", value.fget, value.fset, value.fdel
    if isinstance(value, (classmethod, staticmethod)):
        return type(value).__name__, value.__func__
    kind = "function" if type(value) is types.FunctionType else "value"
    return kind, value


def _member(part: Any) -> Any:
    kind, *values = part
    if kind == "property":
        return property(*values)
    if kind == "function":
        return _forward(values[0])
    if kind in ("classmethod", "staticmethod"):
        return getattr(builtins, kind)(_forward(values[0]))
    return values[0]


def _forward(remote: Any) -> Any:
    def method(*arguments: Any, **named: Any) -> Any:
        return remote(*arguments, **named)

    method.__name__ = method.__qualname__ = getattr(remote, "__name__", "method")
    return method


def data_base_type(kind: type) -> type | None:
    """The data type that a class derives from; None for any other class."""
    return next((one for one in kind.__mro__ if one in data.MUTABLE or one in data.IMMUTABLE), None)


def data_base_value(value: Any) -> Any:
    """The data that an object of a class derived from a data type contains, whatever its class
    says.
    """
    base: Any = data_base_type(type(value))
    if base in (list, tuple, str, bytes, bytearray):
        return base.__getitem__(value, slice(None))
    if base in (int, float):
        return base.__pos__(value)
    if base is not None and issubclass(base, dict):
        return dict(dict.items(value))
    if base in (set, frozenset):
        return base(base.__iter__(value))
    if base is None:
        raise RequestForbidden("an object that is no data")
    return base(value)
