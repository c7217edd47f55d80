"""Calls of a program's functions across processes. The candidate serves them: it knows inputs,
never what is expected of them. The judge's end sends them, and takes back data of exact builtin
types; any other object stays in the program, and the judge gets a ``RemoteObject`` for it.
"""

from __future__ import annotations

import builtins
import os
import reprlib
import signal
import socket
import sys
import time
import types
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from ctrl_megatron.sandbox.jail import codec, frames, linux, program
from ctrl_megatron.sandbox.limits import (
    ANSWER_BYTES,
    CALL_BYTES,
    DECODING_BYTES,
    DECODING_SECONDS,
)

NEW_CANDIDATE = b"N"
_FRAME_SLACK = 4096
_NOT_READ = object()
# StopIteration would silently end a loop of the test; the others cannot be made from a text.
_NEVER_RAISED = (StopIteration, StopAsyncIteration, UnicodeError, BaseExceptionGroup)
_EXCEPTIONS: dict[str, Callable[[str], Exception]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, _NEVER_RAISED)
}
_MOST_BASES = 16
_DATA_ATTRIBUTES = frozenset(
    name
    for kind in (str, bytes, int, float, complex, list, tuple, dict, set, range, deque)
    for name in dir(kind)
)
"""A test that asks for one of these expects data, whose method would judge: an object of the
program could answer ``f(x).startswith("expected")`` itself.
"""
_DATA_PREDICATES = frozenset(n for n in _DATA_ATTRIBUTES if n.startswith(("is", "starts", "ends")))


class HarnessFailure(BaseException):
    """A call could not be made, or what came of it not taken: the test has failed, whatever it
    catches. Not an ``Exception``: a test that expects one must not take this for the function's.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class CandidateLost(HarnessFailure):
    """The candidate cannot answer any more."""


def is_of_program(error: BaseException) -> bool:
    """Whether a call of the program raised it."""
    return getattr(error, "_of_program", False)


class _Refused(Exception):
    """The program's end cannot do what is asked, for a reason that is not the function's own."""


class CandidateException(Exception):
    """The function raised something that derives from no builtin exception but ``Exception``."""


class RemoteObject:
    """Stands in the judge for an object of the program.

    It can be given back to the program and has the object's truth value. No comparison accepts it.
    A test that made it by calling a class may read, set and call its attributes, and those of what
    its attributes hold, as far as data has none of the name.
    """

    __slots__ = ("_attributes", "_connection", "_kind", "_number", "_truth")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        connection: CandidateConnection,
        attributes: Callable[[str], bool],
        kind: str,
        truth: bool,
        number: int,
    ) -> None:
        own = {
            "_attributes": attributes,
            "_connection": connection,
            "_kind": kind,
            "_number": number,
            "_truth": truth,
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def __bool__(self) -> bool:
        return self._truth

    def __eq__(self, other: object) -> Any:
        self._connection.refuse(
            f"TypeError: a value of type {self._kind} cannot be compared outside the program"
        )

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._kind} object>"

    def __getattr__(self, name: str) -> Any:
        self._check(name)
        return self._connection.ask(
            {"do": "get", "of": self._number, "name": name}, (), {}, attributes=is_no_data_attribute
        )

    def __setattr__(self, name: str, value: Any) -> None:
        self._check(name)
        self._connection.ask({"do": "set", "of": self._number, "name": name}, (value,), {})

    def _check(self, name: str) -> None:
        reason = f"a test may not ask a value of type {self._kind} for {name!r}"
        if name.startswith("__"):
            raise AttributeError(reason)  # Python itself looks for these
        if not self._attributes(name):
            self._connection.refuse(f"AttributeError: {reason}")


class RemoteCallable(RemoteObject):
    """Stands for a function, a class or a bound method."""

    __slots__ = ()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        of = {"do": "call", "of": self._number, "name": self._kind}
        return self._connection.ask(of, arguments, named)


def own_attribute(name: str) -> bool:
    """Of what a call of a class made: all but those that only data has."""
    return name not in _DATA_PREDICATES


def no_attribute(_name: str) -> bool:
    """Of what a function returned: a test of it expects data, or something to give back or call."""
    return False


def is_no_data_attribute(name: str) -> bool:
    """Of what an attribute holds, which may be meant to be data."""
    return name not in _DATA_ATTRIBUTES


def serve_calls(fd: int, prelude: str, code: str, entry_points: list[str]) -> None:
    """Load ``code`` after ``prelude`` (the setup's imports) and answer calls; never returns.

    The prelude's own functions are no answer to the problem: one that has the name of an entry
    point is not there for the program.
    """
    linux.allow_stack(program.PYTHON_STACK)
    program.begin_program()
    # Not __main__: a program's main guard reads stdin and prints, it is not what is judged.
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
        failure = _failure(error)
    frames.send(fd, {"loaded": failure is None, "error": failure})
    calls = frames.FrameReader(fd, limit=CALL_BYTES)
    server = _CallServer(module.__dict__)
    while failure is None:
        # No name holds a call: the program could look it up from the next one.
        frames.send_encoded(fd, server.answer(calls.receive()))
    os._exit(0)


class _CallServer:
    """Answers calls of what ``names`` holds, and of the objects that the judge has been told of."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._objects: list[Any] = []

    def answer(self, call: dict[str, Any]) -> bytes:
        """The frame that answers ``call``."""
        try:
            arguments = [codec.decode(item, self._held) for item in call["args"]]
            named = {name: codec.decode(item, self._held) for name, item in call["named"].items()}
            value = codec.encode(self._do(call, arguments, named), self._hold)
            answer: dict[str, Any] = {"id": call["id"], "value": value}
            if "in_place" in call:
                answer["changed"] = self._changes(arguments, call["args"])
            encoded = frames.encode(answer)
            if len(encoded) > ANSWER_BYTES:
                raise _Refused(f"the returned value takes more than {ANSWER_BYTES} bytes")
        except (_Refused, codec.CodecError) as error:
            return frames.encode({"id": call["id"], "refused": str(error)})
        except BaseException as error:
            return frames.encode({"id": call["id"], "error": _failure(error)})
        return encoded

    def _do(self, call: dict[str, Any], arguments: list[Any], named: dict[str, Any]) -> Any:
        name, do = call["name"], call.get("do")
        if do is None:
            if name not in self._names:
                raise _Refused(f"NameError: name {name!r} is not defined")
            if not callable(self._names[name]):
                raise _Refused(f"TypeError: {name!r} is no function")
            return self._names[name](*arguments, **named)
        target = self._objects[call["of"]]
        if do == "get":
            return getattr(target, name)
        if do == "set":
            return setattr(target, name, *arguments)
        return target(*arguments, **named)

    def _changes(self, arguments: list[Any], before: list[Any]) -> list[list[Any]]:
        """What the call has changed: place of an argument, and what it is now."""
        after = (
            (i, codec.encode(argument, self._hold))
            for i, argument in enumerate(arguments)
            if isinstance(argument, (list, dict, set))
        )
        return [[i, data] for i, data in after if data != before[i]]

    def _hold(self, value: Any) -> list[Any]:
        number = len(self._objects)
        told = ["object", type(value).__name__[:80], bool(value), callable(value), number]
        self._objects.append(value)
        return told

    def _held(self, rest: list[Any]) -> Any:
        return self._objects[rest[0]]


def _failure(error: BaseException) -> dict[str, Any]:
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "solution.py":
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        line = error.lineno
    try:
        # KeyError alone shows its argument as code.
        only = error.args[0] if len(error.args) == 1 else None
        text = (only if type(only) is str else str(error))[:500]
    except BaseException:
        text = ""
    kinds = [kind.__name__[:80] for kind in type(error).__mro__[:_MOST_BASES]]
    bases = [name for name in kinds[1:] if name not in ("Exception", "BaseException", "object")]
    return {"type": kinds[0], "bases": bases, "text": text, "line": line}


class CandidateConnection:
    """The judge's line to the candidate of the moment. ``lost`` holds what ended it."""

    def __init__(self, requests: socket.socket, seconds: float) -> None:
        self._seconds = seconds
        requests.sendall(NEW_CANDIDATE)
        _, (self._fd,), _, _ = socket.recv_fds(requests, 64, 1)
        self._answers = frames.FrameReader(self._fd, limit=ANSWER_BYTES + _FRAME_SLACK)
        self._call: dict[str, Any] | None = None
        self._error: Any = None
        self._value: Any = _NOT_READ
        self.lost: CandidateLost | None = None
        self.failure: HarnessFailure | None = None
        """The first of the test."""
        self.deadline = 0.0
        self.busy = False
        """A call is on the wire: whatever interrupts it now leaves the connection unusable."""
        self.calls = 0
        """What the test has asked of the program so far."""

    def begin_test(self, deadline: float) -> None:
        """A test begins; it ends by ``deadline`` (``time.monotonic`` seconds)."""
        self.deadline, self.failure, self.calls = deadline, None, 0
        self._call, self._error, self._value = None, None, _NOT_READ

    @property
    def last_call(self) -> str:
        """The last call of the test and what came of it, empty where there was none."""
        if self._call is None:
            return ""
        arguments = ", ".join(_short_encoded(item) for item in self._call["args"])
        text = f"{self._call['name']}({arguments})"
        if self._error is not None:
            return f"{text} raised {_describe(self._error)}"
        return text if self._value is _NOT_READ else f"{text} returned {_short(self._value)}"

    def load(self) -> str | None:
        """Wait until the program is loaded; the text of its failure, None when it loaded."""
        self.deadline = time.monotonic() + self._seconds
        message = self._receive()
        if message.get("loaded") is True:
            return None
        return f"the program failed to load: {_describe(message.get('error'))}"

    def call(
        self,
        name: str,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        *,
        in_place: bool = False,
    ) -> Any:
        """Call the program's ``name``. With ``in_place`` what it does to its arguments is done to
        these as well.
        """
        attributes = own_attribute if name[0].isupper() else no_attribute
        what = {"name": name, **({"in_place": True} if in_place else {})}
        return self.ask(what, arguments, named, attributes=attributes)

    def ask(
        self,
        what: dict[str, Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        *,
        attributes: Callable[[str], bool] = no_attribute,
    ) -> Any:
        """Have the program do something. ``attributes``: which of those of the object that it
        returns a test may ask for.
        """
        if self.lost is not None:
            raise self.lost
        try:
            request = self._request(what, arguments, named)
        except codec.CodecError as error:
            self.refuse(f"CodecError: {error}")
        self.busy, self.calls = True, self.calls + 1
        self._send(frames.encode(request))
        self._call, self._error, self._value = request, None, _NOT_READ
        answer = self._receive()
        self.busy = False
        if answer.get("id") != request["id"]:
            self._lose("protocol", "the program sent an answer to no call")
        if "refused" in answer:
            reason = answer["refused"]
            self.refuse(reason if isinstance(reason, str) else "the program refused")
        if "error" in answer:
            self._error = answer["error"]
            error = _exception(self._error)
            vars(error)["_of_program"] = True
            raise error
        changing = arguments if "in_place" in what else ()
        self._value = self._read(answer, changing, attributes)
        return self._value

    def _read(
        self, answer: dict[str, Any], changing: tuple[Any, ...], attributes: Callable[[str], bool]
    ) -> Any:
        """The returned value; what the call has done to ``changing`` is done to them. Reading has a
        time of its own: a program's value may be made to take long, a set of equal hashes for one.
        """

        def remote(rest: list[Any]) -> RemoteObject:
            kind, truth, is_callable, number = rest
            made = RemoteCallable if is_callable is True else RemoteObject
            return made(self, attributes, str(kind)[:80], truth is True, int(number))

        timed = self._answers.size > DECODING_BYTES
        if timed:
            signal.setitimer(signal.ITIMER_REAL, min(DECODING_SECONDS, self._left()))
        try:
            value = codec.decode(answer.get("value"), remote)
            if changing:
                _apply_changes(changing, answer.get("changed", []), remote)
        except (codec.CodecError, TypeError, ValueError, IndexError, RecursionError) as error:
            self._lose("protocol", f"the program sent a malformed answer: {error}")
        except MemoryError:
            self._lose("protocol", "the returned value takes too much memory")
        except CandidateLost:
            self._lose("timeout", "the returned value takes too long to read")
        if timed:
            signal.setitimer(signal.ITIMER_REAL, self._left())
        return value

    def _left(self) -> float:
        """Seconds until the deadline, never 0: that would switch a timer off."""
        return max(self.deadline - time.monotonic(), 1e-6)

    def close(self) -> None:
        """Let go of the candidate."""
        os.close(self._fd)

    def _request(
        self, what: dict[str, Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": os.urandom(4).hex(),
            **what,
            "args": [codec.encode(value, self._own) for value in arguments],
            "named": {key: codec.encode(value, self._own) for key, value in named.items()},
        }

    def _own(self, value: Any) -> list[Any]:
        """What the program knows of an object of its own."""
        if not isinstance(value, RemoteObject):
            return codec.refuse(value)
        if value._connection is not self:
            self.refuse("an object of the program is gone: the program was started again")
        return ["object", value._number]

    def _send(self, data: bytes) -> None:
        try:
            frames.send_encoded(self._fd, data)
        except frames.PeerGone:
            self._lose("died", "the program ended")

    def _receive(self) -> dict[str, Any]:
        message: Any = None
        try:
            message = self._answers.receive(self.deadline)
        except frames.PeerGone:
            self._lose("died", "the program ended before it answered")
        except frames.DeadlinePassed:
            self._lose("timeout", "time limit exceeded")
        except (frames.FrameError, MemoryError) as error:
            self._lose("protocol", f"the program broke the protocol: {error}")
        if not isinstance(message, dict):
            self._lose("protocol", "the program broke the protocol")
        return message

    def refuse(self, reason: str) -> NoReturn:
        """End the test: what it asks for cannot be done. The candidate goes on."""
        self.failure = self.failure or HarnessFailure("failed", reason)
        raise self.failure

    def _lose(self, status: str, reason: str) -> NoReturn:
        self.lost = CandidateLost(status, reason)
        raise self.lost


def _apply_changes(arguments: tuple[Any, ...], changes: list[Any], other: codec.Other) -> None:
    for index, data in changes:
        target, value = arguments[index], codec.decode(data, other)
        if type(target) is list and type(value) is list:
            target[:] = value
        elif isinstance(target, (dict, set)) and isinstance(value, type(target)):
            target.clear()
            target.update(value)
        else:
            raise codec.CodecError("a change of an argument that cannot change")


def _exception(error: Any) -> Exception:
    name, text = (error.get("type"), error.get("text")) if isinstance(error, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(text, str):
        return CandidateException("unknown error")
    bases = error.get("bases")
    names = [name, *(bases if isinstance(bases, list) else ())]
    # One of the program's own is what it derives from.
    kinds = (_EXCEPTIONS[kind] for kind in names if isinstance(kind, str) and kind in _EXCEPTIONS)
    return next(kinds, CandidateException)(text)


def _describe(error: Any) -> str:
    if not isinstance(error, dict):
        return "unknown error"
    kind, text, line = (error.get(key) for key in ("type", "text", "line"))
    # Nothing but text: what a program sends may be nested too deeply to print.
    if not isinstance(kind, str) or not isinstance(text, str):
        return "an error that is not described"
    return f"{kind}: {text}{f' (line {line})' if isinstance(line, int) else ''}"


def _short(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception:
        return "<a value that cannot be shown>"


def _short_encoded(data: Any) -> str:
    """One of our own arguments, which are the test's."""
    try:
        return _short(codec.decode(data, lambda _: "an object of the program"))
    except codec.CodecError:
        return "<a value that cannot be shown>"
