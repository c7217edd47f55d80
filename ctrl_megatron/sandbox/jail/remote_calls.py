"""The judge's connection to the candidate: calls of the program's functions and operations on its
objects.

Data of exact builtin types is returned by value, instances of classes that the tests define as
instances of the tests' own classes, and any other object as a ``RemoteObject``.
"""

from __future__ import annotations

import builtins
import os
import reprlib
import socket
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import Any, NoReturn

from ctrl_megatron.sandbox.jail import codec, frames
from ctrl_megatron.sandbox.jail.clock import JudgeClock
from ctrl_megatron.sandbox.jail.exceptions import (
    CandidateLost,
    HarnessFailure,
    decode_exception,
    describe,
)
from ctrl_megatron.sandbox.jail.instances import (
    InstanceWriter,
    changeable,
    read_instances,
    refill,
)
from ctrl_megatron.sandbox.jail.remote_objects import (
    RemoteObject,
    Stub,
    Trust,
    builtin_name,
    remote_object,
)
from ctrl_megatron.sandbox.limits import (
    ANSWER_BYTES,
    DECODING_BYTES,
    DECODING_SECONDS,
    WALL_TIME_OVER,
)

NEW_CANDIDATE = b"N"
_FRAME_SLACK = 4096
_NOT_READ = object()
_MALFORMED = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
_OUTPUTS = ("stdout", "stderr")
_INPUT = input
_PLAIN = (int, str, bool, type(None))
_PLAIN_ANSWER = 2
"""Entries of an answer that carries only a value of a type in ``_PLAIN``."""


class CandidateConnection:
    """The connection to the current candidate. ``lost`` is the reason why it ended, None while it
    works.

    ``classes`` are the names of the program that the tests use as classes. ``class_of_tests``
    returns the class that the tests define under a name, or None.
    """

    def __init__(
        self,
        requests: socket.socket,
        clock: JudgeClock,
        *,
        classes: Container[int | str | None] = (),
        class_of_tests: Callable[[str], type | None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._classes = classes
        self._class_of_tests = class_of_tests
        requests.sendall(NEW_CANDIDATE)
        pid, (self._fd,), _, _ = socket.recv_fds(requests, 64, 1)
        clock.program = int(pid)
        self._answers = frames.FrameReader(self._fd, limit=ANSWER_BYTES + _FRAME_SLACK)
        self._objects: dict[tuple[int, bool], RemoteObject] = {}
        """Key: the object's number, and whether the test itself created it."""
        self._given: list[Callable[..., Any]] = []
        """Functions of the tests that the program may call; the index is the number that it knows.
        """
        self._given_numbers: dict[int, int] = {}
        self._call: dict[str, Any] | None = None
        self._error: Any = None
        self._value: Any = _NOT_READ
        self.lost: CandidateLost | None = None
        self.failure: HarnessFailure | None = None
        """The first failure in the current test."""
        self.busy = False
        """A call has been sent and not answered. An interruption now makes the connection unusable.
        """
        self.calls = 0
        """Requests to the program in the current test."""

    def begin_test(self) -> None:
        """Begin a test."""
        self.failure, self.calls = None, 0
        self._call, self._error, self._value = None, None, _NOT_READ

    @property
    def last_call(self) -> str:
        """The last call of the test and its result, as text; empty if there was none."""
        if self._call is None:
            return ""
        arguments = ", ".join(_short_encoded(item) for item in self._call["args"])
        of, name = self._call["of"], self._call["name"]
        if isinstance(of, int):
            of = _short(self._objects.get((of, True)) or self._objects.get((of, False)))
        text = f"{of}.{name}" if name else f"{of}({arguments})"
        if self._error is not None:
            return f"{text} raised {describe(self._error)}"
        return text if self._value is _NOT_READ else f"{text} returned {_short(self._value)}"

    def load(self) -> str | None:
        """Wait until the program is loaded. Returns None, or the text of its failure."""
        self._clock.begin()
        self._clock.start()
        try:
            message = self._receive()
        except CandidateLost as lost:
            self.lost = lost
            raise
        finally:
            self._clock.stop()
        if message.get("loaded") is True:
            return None
        return f"the program failed to load: {describe(message.get('error'))}"

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
        """Have the program perform the action ``do`` on ``of``: an object by its number, or a name
        of the program. ``trust`` is the trust in that object. With ``in_place`` the changes that a
        call makes to its arguments are repeated on the test's own arguments.
        """
        if self.lost is not None:
            raise self.lost
        writer = InstanceWriter()
        what = {"of": of, "do": do, "name": name, **more}
        if in_place:
            what["in_place"] = True
        if of in self._classes or trust >= Trust.MEMBER:
            what["whole"] = True
        request = self._request(what, arguments, named or {}, writer)
        before, self.busy, self.calls = self.busy, True, self.calls + 1
        self._send(request)
        self._call, self._error, self._value = request, None, _NOT_READ
        answer = self._answer_to(request["id"])
        self._call, self.busy = request, before
        if len(answer) == _PLAIN_ANSWER and type(answer.get("value", ...)) in _PLAIN:
            self._value = answer["value"]
            return self._value
        for output in request.get("hear", ()):
            getattr(sys, output).write(str(answer.get(output, "")))
        if "refused" in answer:
            self.refuse(describe(answer["refused"]))
        reader = _AnswerReader(self, request, writer.instances, self._trust_for(of, do, trust))
        changing = changeable([*arguments, *(named or {}).values()]) if in_place else []
        value = self._timed(lambda: reader.read(answer, changing))
        if "error" in answer:
            self._error = answer["error"]
            error = decode_exception(self._error, self._class_of_tests)
            vars(error)["_of_program"] = True
            raise error
        if do == "get" and of in self._classes and isinstance(value, RemoteObject):
            value._traits["makes"] = True  # as the class itself does
        self._value = value
        return value

    def refuse(self, reason: str) -> NoReturn:
        """End the test as failed: a value cannot cross, or the answer would decide the verdict. The
        candidate remains usable.
        """
        self.failure = self.failure or HarnessFailure("failed", reason)
        raise self.failure

    def close(self) -> None:
        """Close the connection."""
        os.close(self._fd)

    def object_of(self, traits: Any, trust: Callable[[str | None], Trust]) -> RemoteObject:
        """The remote object for the description ``traits`` that the program sent."""
        number, name = int(traits["number"]), traits.get("class")
        level = trust(name if isinstance(name, str) else None)
        if traits.get("single") is True:
            level = min(level, Trust.MEMBER)
        # An object that a method returns is trusted less than one that the test created, even if it
        # is the same object.
        key = number, level is Trust.MADE
        if key not in self._objects:
            self._objects[key] = remote_object(self, traits, level)
        known = self._objects[key]
        if level > known._trust:
            object.__setattr__(known, "_trust", level)
        return known

    def given(self, number: Any) -> Any:
        """The function of the tests whose number the program returned."""
        return self._given[number[0] if isinstance(number, list) else number]

    def exception(self, error: Any) -> BaseException:
        """The exception that an iterator of the program raised."""
        return decode_exception(error, self._class_of_tests)

    def class_of_tests(self, name: Any) -> type:
        """The class that the tests define under a name. Raises ``CodecError`` if there is none."""
        found = self._class_of_tests(name) if isinstance(name, str) else None
        if found is None:
            raise codec.CodecError("an object of a class that the tests do not define")
        return found

    def _trust_for(self, of: int | str, do: str, trust: Trust) -> Callable[[str | None], Trust]:
        """The trust in an object of an answer, as a function of the entry point's class that it
        belongs to (None for any other class).
        """
        of_class = isinstance(of, str) and of in self._classes
        makes = do != "get" and (of_class or trust is Trust.MADE)

        def level(name: str | None) -> Trust:
            if name in self._classes:
                return Trust.MADE if makes else Trust.MEMBER
            if name is not None:
                return Trust.OBJECT
            return Trust.RESULT if isinstance(of, str) else min(trust, Trust.OBJECT)

        return level

    # --- messages ---------------------------------------------------------------------------------

    def _request(
        self,
        what: dict[str, Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        writer: InstanceWriter,
    ) -> dict[str, Any]:
        encode = self._encoder(writer)
        try:
            request = {
                "id": os.urandom(4).hex(),
                **what,
                "args": [encode(value) for value in arguments],
                "named": {key: encode(value) for key, value in named.items()},
            }
            if table := writer.table(encode):
                request["table"] = table
        except (codec.CodecError, RecursionError) as error:
            self.refuse(f"{error}")
        if hear := [o for o in _OUTPUTS if getattr(sys, o) is not getattr(sys, f"__{o}__")]:
            request["hear"] = hear
        if builtins.input is not _INPUT:
            request["input"] = ["object", "given", [self._give(builtins.input), "input"]]
        if sys.stdin is not sys.__stdin__:
            request["stdin"] = str(sys.stdin.read())
        return request

    def _encoder(self, writer: InstanceWriter) -> Callable[[Any], Any]:
        def other(value: Any) -> Any:
            if isinstance(value, RemoteObject):
                if value._program is not self:
                    self.refuse(
                        "an object of the program no longer exists: the program was restarted"
                    )
                return ["object", "held", value._of]
            if isinstance(value, Stub):
                return ["object", "name", value._of]
            if (name := builtin_name(value)) is not None:
                return ["object", "builtin", name]
            kind = type(value)
            if self._class_of_tests(kind.__name__) is kind:
                if isinstance(value, Enum):
                    return ["object", "member", [kind.__name__, value.name]]
                return ["object", "instance", writer.number(value)]
            if callable(value):
                shown = getattr(value, "__name__", "given")
                return ["object", "given", [self._give(value), str(shown)]]
            if isinstance(value, Iterator):
                return ["object", "iterator", self._give(lambda: list(islice(value, 1)))]
            return codec.refuse(value)

        return lambda value: codec.encode(value, other)

    def _give(self, function: Callable[..., Any]) -> int:
        number = self._given_numbers.setdefault(id(function), len(self._given))
        if number == len(self._given):
            self._given.append(function)
        return number

    def _answer_to(self, number: str) -> dict[str, Any]:
        """The answer to request ``number``; calls of the test's functions that arrive before it are
        executed.
        """
        while True:
            answer = self._receive()
            if "given" not in answer:
                break
            self._send(self._call_given(answer))
        if answer.get("id") != number:
            self._lose("protocol", "the program sent an answer to no call")
        return answer

    def _call_given(self, message: dict[str, Any]) -> dict[str, Any]:
        """Call a function of the test for the program; returns the message with its result or
        exception.
        """
        writer = InstanceWriter()
        reader = _AnswerReader(self, {}, (), self._trust_for("", "", Trust.RESULT))
        function, arguments, named = self._timed(lambda: reader.read_call(message))
        try:
            value = function(*arguments, **named)
        except AssertionError as error:
            # The program could catch it and hide the failed assert.
            self.refuse(f"AssertionError: {error}")
        except Exception as error:
            return {"raised": [_given_kind(error), _given_arguments(error)]}
        encode = self._encoder(writer)
        try:
            answer = {"value": encode(value)}
            return {**answer, "table": writer.table(encode)}
        except (codec.CodecError, RecursionError) as error:
            self.refuse(f"a function of the test: {error}")

    def _timed(self, read: Callable[[], Any]) -> Any:
        """The result of ``read``, which decodes the last message. Decoding has a time limit of its
        own, because a program can return a value that is slow to build, for example a set of equal
        hashes.
        """
        timed = self._answers.size > DECODING_BYTES
        if timed:
            self._clock.start_reading(DECODING_SECONDS)
        try:
            value = read()
        except _MALFORMED as error:
            self._lose("protocol", f"the program sent a malformed answer: {error}")
        except MemoryError:
            self._lose("protocol", "the returned value takes too much memory")
        except CandidateLost as lost:
            if lost.status != "timeout":
                raise
            self._lose("timeout", "the returned value takes too long to read")
        if timed:
            self._clock.start()
        return value

    def _send(self, message: dict[str, Any]) -> None:
        try:
            frames.send(self._fd, message)
        except frames.PeerGone:
            self._lose("died", "the program ended")

    def _receive(self) -> dict[str, Any]:
        message: Any = None
        try:
            message = self._answers.receive(self._clock.deadline)
        except frames.PeerGone:
            self._lose("died", "the program ended before it answered")
        except frames.DeadlinePassed:
            self._lose("timeout", self._clock.over or WALL_TIME_OVER)
        except (frames.FrameError, MemoryError) as error:
            self._lose("protocol", f"the program broke the protocol: {error}")
        if not isinstance(message, dict):
            self._lose("protocol", "the program broke the protocol")
        return message

    def _lose(self, status: str, reason: str) -> NoReturn:
        self.lost = CandidateLost(status, reason)
        raise self.lost


class _AnswerReader:
    """Decodes one message of the program. ``given`` are the instances that were sent with the
    request.
    """

    def __init__(
        self,
        connection: CandidateConnection,
        request: dict[str, Any],
        given: Sequence[Any],
        trust: Callable[[str | None], Trust],
    ) -> None:
        self._connection = connection
        self._request = request
        self._given = given
        self._trust = trust
        self._changing: list[Any] = []

    def read(self, answer: dict[str, Any], changing: list[Any]) -> Any:
        """The returned value. Changes that the call made to ``changing`` are applied to it."""
        self._changing = changing
        made = self._instances(answer, refresh="in_place" in self._request)
        value = self._decode(answer.get("value"), made)
        if "end" in answer:
            end = answer["end"]
            value = (value, end if type(end) is bool else self._connection.exception(end))
        for place, data in answer.get("changed", []) if changing else []:
            refill(changing[place], self._decode(data, made))
        return value

    def read_call(self, message: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
        """Decode a call of a test's function: the function, its positional and its
        named arguments.
        """
        made = self._instances(message, refresh=False)
        arguments = [self._decode(item, made) for item in message["args"]]
        named = {str(key): self._decode(item, made) for key, item in message["named"].items()}
        return self._connection.given(int(message["given"])), arguments, named

    def _instances(self, message: dict[str, Any], *, refresh: bool) -> list[Any]:
        if "table" not in message:
            return []
        return read_instances(
            message["table"],
            class_of=self._class_of,
            decode=self._decode,
            own=self._given,
            refresh=refresh,
        )

    def _class_of(self, name: Any) -> type:
        found = self._connection.class_of_tests(name)
        if issubclass(found, (Enum, BaseException)):
            raise codec.CodecError("an object that cannot be made")
        return found

    def _decode(self, data: Any, made: list[Any]) -> Any:
        def other(rest: list[Any]) -> Any:
            what, which = rest
            if what == "held":
                return self._connection.object_of(which, self._trust)
            if what == "instance":
                return made[which]
            if what == "member":
                kind = self._connection.class_of_tests(which[0])
                if not issubclass(kind, Enum):
                    raise codec.CodecError("a member of no enumeration")
                return kind[which[1]]
            if what == "argument":
                return self._changing[which]
            if what == "given":
                return self._connection.given(which)
            raise codec.CodecError("an object of no kind")

        return codec.decode(data, other)


def _given_kind(error: Exception) -> str:
    """Class name of a test's exception under which the program knows it."""
    return next(k.__name__ for k in type(error).__mro__ if k.__module__ in ("builtins", "tests"))


def _given_arguments(error: Exception) -> list[Any]:
    try:
        return [codec.encode(argument) for argument in error.args]
    except codec.CodecError:
        return [str(error)]


class _Shortener(reprlib.Repr):
    """Shows remote objects by their type, without a request to the program."""

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, RemoteObject):
            return f"<{x._traits['type']} object>"
        return super().repr1(x, level)


_SHORTENER = _Shortener()


def _short(value: Any) -> str:
    try:
        return _SHORTENER.repr(value)
    except Exception:
        return "<a value that cannot be shown>"


def _short_encoded(data: Any) -> str:
    """Show an argument that the test passed, from its encoded form."""
    try:
        return _short(codec.decode(data, lambda _: "an object of the program"))
    except codec.CodecError:
        return "<a value that cannot be shown>"
