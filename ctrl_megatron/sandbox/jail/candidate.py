"""The candidate process: loads the program and executes the calls that the judge sends. It sees the
arguments of the calls, never the expected results.

Data is returned by value, and so are instances of classes that the tests define too. Any other
object stays in this process; the judge gets a number for it and a description of its type.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import io
import math
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NoReturn

from ctrl_megatron.sandbox.jail import codec, frames, linux, program
from ctrl_megatron.sandbox.jail.exceptions import builtin_exception, encode_exception
from ctrl_megatron.sandbox.jail.instances import (
    InstanceWriter,
    changeable,
    contents,
    fields,
    read_instances,
    same_things,
)
from ctrl_megatron.sandbox.limits import ANSWER_BYTES, CALL_BYTES

_OFFERS = """
call contains delitem enter float format getitem hash index int iter len next reversed setitem
complex round trunc floor ceil
"""
_BUILTINS = """
len str repr hash int float complex iter reversed round format bool divmod isinstance issubclass
"""
_OPERATORS = """
eq lt le gt ge contains index getitem setitem delitem neg pos abs inv add sub mul truediv floordiv
mod pow matmul and_ or_ xor lshift rshift iadd isub imul itruediv ifloordiv imod ipow imatmul iand
ior ixor ilshift irshift
"""
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in _BUILTINS.split()},
    **{name: getattr(operator, name) for name in _OPERATORS.split()},
    **{"trunc": math.trunc, "floor": math.floor, "ceil": math.ceil},
    **{"copy": copy.copy, "deepcopy": copy.deepcopy},
    "enter": lambda manager: type(manager).__enter__(manager),
}
"""Bound before the program runs, because the program may replace anything in a module."""
_NOTHING = contextlib.nullcontext()


def serve_calls(
    fd: int, prelude: str, code: str, entry_points: list[str], shared_classes: list[str]
) -> None:
    """Load ``prelude`` (the setup's imports) and then ``code``, and answer calls; never returns.

    Functions of the prelude are not the program's answer: a name of ``entry_points`` that the
    prelude defines is removed before ``code`` is loaded. ``shared_classes`` are the names of
    classes that the tests define and may pass instances of.
    """
    linux.allow_stack(program.PYTHON_STACK)
    outputs = program.begin_program(_Printed)
    # Not __main__: what the program does under its main guard is not judged here.
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    failure = None
    try:
        if prelude:
            exec(compile(prelude, "setup.py", "exec", dont_inherit=True), module.__dict__)
            for name in entry_points:
                module.__dict__.pop(name, None)
        exec(compile(code, "solution.py", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        failure = encode_exception(error)
    frames.send(fd, {"loaded": failure is None, "error": failure})
    if failure is None:
        _CallServer(fd, module.__dict__, entry_points, shared_classes, outputs).serve()
    os._exit(0)


class _Printed(io.FileIO):
    """An output stream of the program. ``heard`` collects the bytes that are written, unless it is
    None.
    """

    heard: list[bytes] | None = None

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        if self.heard is not None:
            self.heard.append(bytes(data[:written]))
        return written


class _Refused(Exception):
    """A value cannot cross to the judge, or a name does not exist. The program raised nothing."""


class _CallServer:
    """Executes calls of the objects in ``names``, and of objects whose numbers the judge knows."""

    def __init__(
        self,
        fd: int,
        names: dict[str, Any],
        entry_points: list[str],
        shared_classes: list[str],
        outputs: dict[str, _Printed],
    ) -> None:
        self._fd = fd
        self._names = names
        self._entry_points = entry_points
        self._shared = frozenset(shared_classes)
        self._outputs = outputs
        self._calls = frames.FrameReader(fd, limit=CALL_BYTES)
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        """Number of each object in ``_objects``, by ``id``."""
        self._offers: dict[type, str] = {}
        self._plain: dict[str, type] = {}
        """Stand-in classes for instances whose class the program does not define."""
        self._given: dict[int, Callable[..., Any]] = {}
        """Functions of the test that the program received, by the judge's number."""
        self._given_numbers: dict[int, int] = {}

    def serve(self) -> NoReturn:
        while True:
            # The call is bound to no name here, so that the program cannot find it in a frame
            # during the next call.
            frames.send_encoded(self._fd, self._answer(self._calls.receive()))

    def _answer(self, call: dict[str, Any]) -> bytes:
        """Execute ``call`` and return the encoded answer."""
        answer: dict[str, Any] = {"id": call["id"]}
        try:
            target, arguments, named, given = self._read(call)
            before = [fields(instance) for instance in given]
            containers = changeable([*arguments, *named.values()]) if "in_place" in call else []
            held = [contents(container) for container in containers]
            value = None
            try:
                with self._surroundings(call, answer):
                    if call["do"] == "next":
                        value, answer["end"] = _next(target, call["count"])
                    else:
                        value = self._do(call, target, arguments, named)
            except BaseException as error:
                answer["error"] = encode_exception(error)
            writer = InstanceWriter(given)
            encode = self._encoder(writer)
            answer["value"] = self._result(call, value, encode)
            if containers:
                places = {id(container): i for i, container in enumerate(containers)}
                answer["changed"] = [
                    [i, _shallow(container, places, encode)]
                    for i, container in enumerate(containers)
                    if not same_things(held[i], contents(container))
                ]
            if writer.instances:
                same = all(map(_same_fields, before, map(fields, given)))
                answer["table"] = writer.table(encode, len(given) if same else 0)
            encoded = frames.encode(answer)
            if len(encoded) > ANSWER_BYTES:
                raise _Refused(f"the returned value takes more than {ANSWER_BYTES} bytes")
        except BaseException as error:
            refused = str(error) if isinstance(error, _Refused) else encode_exception(error)
            return frames.encode({"id": call["id"], "refused": refused})
        return encoded

    def _read(self, call: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any], list[Any]]:
        """The object that is called, the positional and named arguments, and the instances that
        came with the call.
        """
        given = self._instances(call)
        read = self._reader(given)
        arguments = [codec.decode(item, read) for item in call["args"]]
        named = {name: codec.decode(item, read) for name, item in call["named"].items()}
        of = call["of"]
        if isinstance(of, int):
            return self._objects[of], arguments, named, given
        if of not in self._names:
            raise _Refused(f"NameError: name {of!r} is not defined")
        if call["do"] == "call" and not callable(self._names[of]):
            raise _Refused(f"TypeError: {of!r} is no function")
        return self._names[of], arguments, named, given

    def _do(
        self, call: dict[str, Any], target: Any, arguments: list[Any], named: dict[str, Any]
    ) -> Any:
        do, name = call["do"], call["name"]
        if do == "call":
            return target(*arguments, **named)
        if do == "get":
            if call.get("own") and not _is_own(target, name):
                raise AttributeError(f"{type(target).__name__!r} object has no attribute {name!r}")
            return getattr(target, name)
        if do == "set":
            return setattr(target, name, *arguments)
        if do == "exit":
            kind = arguments[0]
            error = None if kind is None else builtin_exception(kind)("")
            return bool(type(target).__exit__(target, error and type(error), error, None))
        if do == "data":
            return target
        operands = (*arguments, target) if "last" in call else (target, *arguments)
        return _OPERATIONS[name](*operands)

    def _result(self, call: dict[str, Any], value: Any, encode: Callable[[Any], Any]) -> Any:
        """The encoded result of a call. With ``whole`` in the call the tests use an object as one
        of a class of the program, so an instance stays an object even if its class derives from a
        data type.
        """
        kind = type(value)
        own = kind.__module__ == "solution" and not codec.is_named_tuple(kind)
        whole = call.get("whole") and own and call["do"] != "data"
        if whole and codec.holds_data(kind) and kind.__name__ not in self._shared:
            return ["object", "held", self._hold(value)]
        return encode(value)

    # --- encoding and decoding --------------------------------------------------------------------

    def _encoder(self, writer: InstanceWriter) -> Callable[[Any], Any]:
        def other(value: Any) -> Any:
            name = type(value).__name__
            if name in self._shared and self._class_of(name) is type(value):
                if isinstance(value, Enum):
                    return ["object", "member", [name, value.name]]
                return ["object", "instance", writer.number(value)]
            if id(value) in self._given_numbers:
                return ["object", "given", self._given_numbers[id(value)]]
            return ["object", "held", self._hold(value)]

        return lambda value: codec.encode(value, other)

    def _hold(self, value: Any) -> dict[str, Any]:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        kind = type(value)
        if kind not in self._offers:
            self._offers[kind] = " ".join(name for name in _OFFERS.split() if _offered(kind, name))
        traits = {"number": number, "type": kind.__name__[:80], "offers": self._offers[kind]}
        for name in self._entry_points:
            own = self._names.get(name)
            if isinstance(own, type) and (own in kind.__mro__ or value is own):
                traits["class"] = name
        if isinstance(value, Iterator):
            traits["iterator"] = True
            traits["ahead"] = kind.__module__ in ("builtins", "itertools")
        if codec.holds_data(kind):
            traits["data"] = True
        if isinstance(value, Enum):
            traits["single"] = True
        return traits

    def _reader(self, made: list[Any]) -> Callable[[list[Any]], Any]:
        """A decoder for the values of a message that are not data."""

        def other(rest: list[Any]) -> Any:
            what, which = rest
            if what == "held":
                return self._objects[which]
            if what == "name":
                return self._names[which]
            if what == "instance":
                return made[which]
            if what == "member":
                return self._class_of(which[0])[which[1]]  # type: ignore[index]
            if what == "builtin":
                return getattr(builtins, which)
            if what == "iterator":
                return _given_iterator(self._function(which, "next"))
            return self._function(*which)

        return other

    def _instances(self, message: dict[str, Any]) -> list[Any]:
        if not message.get("table"):
            return []
        return read_instances(
            message["table"],
            class_of=self._class_of,
            decode=lambda data, made: codec.decode(data, self._reader(made)),
        )

    def _class_of(self, name: str) -> type:
        """The program's class of that name, or a plain class if it defines none."""
        found = self._names.get(name)
        if isinstance(found, type):
            return found
        return self._plain.setdefault(name, type(name, (), {"__module__": "solution"}))

    # --- functions of the test --------------------------------------------------------------------

    def _function(self, number: int, name: str) -> Callable[..., Any]:
        """A function for the program that calls the test's function ``number``."""
        if number in self._given:
            return self._given[number]

        def given(*arguments: Any, **named: Any) -> Any:
            return self._ask_judge(number, arguments, named)

        given.__name__ = given.__qualname__ = name
        given.__module__ = "tests"
        self._given[number] = given
        self._given_numbers[id(given)] = number
        return given

    def _ask_judge(self, number: int, arguments: Any, named: Any) -> Any:
        """Call a function of the test; requests that the judge sends meanwhile are answered."""
        writer = InstanceWriter()
        encode = self._encoder(writer)
        message = {
            "given": number,
            "args": [encode(argument) for argument in arguments],
            "named": {name: encode(value) for name, value in named.items()},
        }
        message["table"] = writer.table(encode)
        frames.send(self._fd, message)
        while True:
            answer = self._calls.receive()
            if "do" in answer:
                frames.send_encoded(self._fd, self._answer(answer))
                continue
            if "raised" in answer:
                kind, held = answer["raised"]
                raise builtin_exception(kind)(*map(codec.decode, held))
            return codec.decode(answer["value"], self._reader(self._instances(answer)))

    # --- input and output -------------------------------------------------------------------------

    def _surroundings(
        self, call: dict[str, Any], answer: dict[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        unusual = any(name in call for name in ("input", "stdin", "hear"))
        return self._redirected(call, answer) if unusual else _NOTHING

    @contextlib.contextmanager
    def _redirected(self, call: dict[str, Any], answer: dict[str, Any]) -> Iterator[None]:
        """Replace ``input`` and standard input by the test's replacements, and collect for the
        answer what the program prints.
        """
        before, heard = (builtins.input, sys.stdin), call.get("hear", ())
        if "input" in call:
            builtins.input = codec.decode(call["input"], self._reader([]))
        if "stdin" in call:
            sys.stdin = io.StringIO(call["stdin"])
        for name in heard:
            _flush(name)
            self._outputs[name].heard = []
        try:
            yield
        finally:
            if "input" in call:
                builtins.input = before[0]
            if "stdin" in call:
                sys.stdin = before[1]
            for name in heard:
                _flush(name)
                printed, self._outputs[name].heard = self._outputs[name].heard, None
                answer[name] = b"".join(printed or ()).decode(errors="replace")


def _given_iterator(fetch: Callable[[], Any]) -> Iterator[Any]:
    """Yield the items of an iterator of the test; ``fetch`` returns the next item in a list, or an
    empty list at the end.
    """
    while items := fetch():
        yield items[0]


def _next(iterator: Any, count: int) -> tuple[list[Any], Any]:
    """Up to ``count`` items, and what follows them: True for the end, False for more items, or the
    exception that the iterator raised.
    """
    items: list[Any] = []
    try:
        for _ in range(count):
            items.append(next(iterator))
    except StopIteration:
        return items, True
    except BaseException as error:
        return items, encode_exception(error)
    return items, False


def _shallow(container: Any, places: dict[int, int], encode: Callable[[Any], Any]) -> Any:
    """Encode a changed argument. Parts that are themselves arguments are encoded by their place."""

    def part(value: Any) -> Any:
        place = places.get(id(value))
        return encode(value) if place is None else ["object", "argument", place]

    if isinstance(container, dict):
        return ["dict", [[encode(key), part(value)] for key, value in dict.items(container)]]
    if isinstance(container, bytearray):
        return encode(container)
    return [type(container).__name__, [part(item) for item in container]]


def _same_fields(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return same_things([*before], [*now]) and same_things([*before.values()], [*now.values()])


def _is_own(target: Any, name: str) -> bool:
    """Whether the attribute belongs to the object, or is a method or property of its class."""
    if name in fields(target):
        return True
    found = [kind.__dict__[name] for kind in type(target).__mro__ if name in kind.__dict__]
    return bool(found) and hasattr(type(found[0]), "__get__")


def _offered(kind: type, name: str) -> bool:
    name = f"__{name}__"
    return next((k.__dict__[name] for k in kind.__mro__ if name in k.__dict__), None) is not None


def _flush(name: str) -> None:
    for stream in {id(s): s for s in (getattr(sys, name), getattr(sys, f"__{name}__"))}.values():
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
