"""The judge's line to the candidate: calls out, data of exact builtin types back."""

from __future__ import annotations

import builtins
import os
import reprlib
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from ctrl_megatron.sandbox.jail import codec, frames
from ctrl_megatron.sandbox.jail.candidate import ANSWER_BYTES
from ctrl_megatron.sandbox.jail.foresight import Call

NEW_CANDIDATE = b"N"
_FRAME_SLACK = 4096
_AHEAD_BYTES = 1 << 16
"""Of calls that are sent together: less than an empty socket takes, so that sending never waits for
a program that waits for its answer to be read."""
# StopIteration would silently end a loop of the test; the others cannot be made from a text.
_NEVER_RAISED = (StopIteration, StopAsyncIteration, UnicodeError, BaseExceptionGroup)
_EXCEPTIONS: dict[str, Callable[[str], Exception]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, _NEVER_RAISED)
}


class Lost(BaseException):
    """The candidate cannot answer any more. Not an ``Exception``: a test must not catch it."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class CandidateException(Exception):
    """The function raised something that has no builtin exception's name."""


class Connection:
    """The candidate of the moment. ``broken`` holds what ended it."""

    def __init__(self, asks: socket.socket, seconds: float) -> None:
        self._seconds = seconds
        asks.sendall(NEW_CANDIDATE)
        _, (self._fd,), _, _ = socket.recv_fds(asks, 64, 1)
        self._answers = frames.Reader(self._fd, limit=ANSWER_BYTES + _FRAME_SLACK)
        self._call: dict[str, Any] | None = None
        self._answer: dict[str, Any] | None = None
        self._ahead: deque[dict[str, Any]] = deque()
        self.broken: Lost | None = None
        self.deadline = 0.0
        self.busy = False
        """A call is on the wire: whatever interrupts it now leaves the connection unusable."""

    def begin(self, deadline: float) -> None:
        """A test begins; it ends by ``deadline`` (``time.monotonic`` seconds)."""
        self.deadline, self._call, self._answer = deadline, None, None

    @property
    def ahead(self) -> int:
        """Calls of tests to come that are on the wire."""
        return len(self._ahead)

    @property
    def last_call(self) -> str:
        """The last call of the test and what came of it, empty where there was none."""
        if self._call is None:
            return ""
        arguments = ", ".join(_short(item) for item in self._call["args"])
        text = f"{self._call['name']}({arguments})"
        if self._answer is None:
            return text
        if "error" in self._answer:
            return f"{text} raised {_describe(self._answer['error'])}"
        return f"{text} returned {_short(self._answer.get('value'))}"

    def load(self) -> str | None:
        """Wait until the program is loaded; the text of its failure, None when it loaded."""
        self.deadline = time.monotonic() + self._seconds
        message = self._receive()
        if message.get("loaded") is True:
            return None
        return f"the program failed to load: {_describe(message.get('error'))}"

    def call(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """One remote call; applies in-place changes of list, dict and set arguments."""
        if self.broken is not None:
            raise self.broken
        request = None if self._ahead else _request(Call(name, arguments, named))
        self.busy = True
        if request is None:
            request = self._ahead.popleft()
        else:
            self._send(frames.encode(request))
        self._call, self._answer = request, None
        answer = self._receive()
        self.busy = False
        if answer.get("id") != request["id"]:
            self._lose("protocol", "the program sent an answer to no call")
        self._answer = answer
        if "error" in answer:
            raise _exception(answer["error"])
        return self._take(arguments, answer)

    def send_ahead(self, calls: Iterable[Call]) -> None:
        """Send the calls that the next tests will make, in their order; as many as fit."""
        requests, data = [], b""
        for call in calls:
            try:
                request = _request(call)
            except codec.CodecError:
                break  # the test itself will say so
            frame = frames.encode(request)
            if len(data) + len(frame) > _AHEAD_BYTES:
                break
            requests.append(request)
            data += frame
        if len(requests) > 1:
            self.busy = True
            self._send(data)
            self.busy = False
            self._ahead.extend(requests)

    def close(self) -> None:
        os.close(self._fd)

    def _send(self, data: bytes) -> None:
        try:
            frames.send_encoded(self._fd, data)
        except frames.PeerGone:
            self._lose("died", "the program ended")

    def _take(self, arguments: tuple[Any, ...], answer: dict[str, Any]) -> Any:
        try:
            value = codec.decode(answer.get("value"))
            self._apply(arguments, answer.get("changed", []))
        except (codec.CodecError, TypeError, ValueError, IndexError, RecursionError) as error:
            self._lose("protocol", f"the program sent a malformed answer: {error}")
        except MemoryError:
            self._lose("protocol", "the returned value takes too much memory")
        else:
            return value

    def _receive(self) -> dict[str, Any]:
        message: Any = None
        try:
            message = self._answers.receive(self.deadline)
        except frames.PeerGone:
            self._lose("died", "the program ended before it answered")
        except frames.DeadlinePassed:
            self._lose("timeout", "time limit exceeded")
        except frames.FrameError as error:
            self._lose("protocol", f"the program broke the protocol: {error}")
        if not isinstance(message, dict):
            self._lose("protocol", "the program broke the protocol")
        return message

    def _lose(self, status: str, reason: str) -> NoReturn:
        self.broken = Lost(status, reason)
        raise self.broken

    @staticmethod
    def _apply(arguments: tuple[Any, ...], changes: list[Any]) -> None:
        for index, data in changes:
            target, value = arguments[index], codec.decode(data)
            if type(target) is list and type(value) is list:
                target[:] = value
            elif isinstance(target, (dict, set)) and isinstance(value, type(target)):
                target.clear()
                target.update(value)
            else:
                raise codec.CodecError("a change of an argument that cannot change")


def _request(call: Call) -> dict[str, Any]:
    return {
        "id": os.urandom(4).hex(),
        "name": call.name,
        "args": [codec.encode(value, strict=True) for value in call.arguments],
        "named": {key: codec.encode(value, strict=True) for key, value in call.named.items()},
    }


def _exception(error: Any) -> Exception:
    if not isinstance(error, dict):
        return CandidateException("unknown error")
    name, text = error.get("type"), error.get("text")
    if not isinstance(name, str) or not isinstance(text, str):
        return CandidateException("unknown error")
    return _EXCEPTIONS.get(name, CandidateException)(text)


def _describe(error: Any) -> str:
    if not isinstance(error, dict):
        return "unknown error"
    kind, text, line = (error.get(key) for key in ("type", "text", "line"))
    # Nothing but text: what a program sends may be nested too deeply to print.
    if not isinstance(kind, str) or not isinstance(text, str):
        return "an error that is not described"
    return f"{kind}: {text}{f' (line {line})' if isinstance(line, int) else ''}"


def _short(data: Any) -> str:
    """An encoded value in a few characters."""
    try:
        return reprlib.repr(codec.decode(data))
    except Exception:
        return "<a value that cannot be shown>"
