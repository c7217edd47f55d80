"""The judge's line to the candidate: calls out, data of exact builtin types back."""

from __future__ import annotations

import builtins
import os
import reprlib
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, NoReturn

from ctrl_megatron.sandbox.jail import codec, frames
from ctrl_megatron.sandbox.jail.candidate import ANSWER_BYTES

NEW_CANDIDATE = b"N"
_FRAME_SLACK = 4096
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

    def __init__(self, init: socket.socket, seconds: float) -> None:
        self._seconds = seconds
        init.sendall(NEW_CANDIDATE)
        _, (self._fd,), _, _ = socket.recv_fds(init, 64, 1)
        self.broken: Lost | None = None
        self.deadline = 0.0
        self.last_call = ""
        self.busy = False
        """A call is on the wire: whatever interrupts it now leaves the connection unusable."""

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
        request = {
            "id": secrets.token_hex(4),
            "name": name,
            "args": [codec.encode(value, strict=True) for value in arguments],
            "named": {key: codec.encode(value, strict=True) for key, value in named.items()},
        }
        self.last_call = f"{name}({', '.join(map(_short, arguments))})"
        self.busy = True
        try:
            frames.send(self._fd, request)
        except frames.PeerGone:
            self._lose("died", "the program ended")
        answer = self._receive()
        self.busy = False
        if answer.get("id") != request["id"]:
            self._lose("protocol", "the program sent an answer to no call")
        if "error" in answer:
            self.last_call += f" raised {_describe(answer['error'])}"
            raise _exception(answer["error"])
        value = self._take(arguments, answer)
        self.last_call += f" returned {_short(value)}"
        return value

    def close(self) -> None:
        os.close(self._fd)

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
            message = frames.receive(
                self._fd, limit=ANSWER_BYTES + _FRAME_SLACK, deadline=self.deadline
            )
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


def _exception(error: Any) -> Exception:
    if not isinstance(error, dict):
        return CandidateException("unknown error")
    name, text = str(error.get("type")), str(error.get("text"))
    return _EXCEPTIONS.get(name, CandidateException)(text)


def _describe(error: Any) -> str:
    if not isinstance(error, dict):
        return "unknown error"
    where = f" (line {error['line']})" if isinstance(error.get("line"), int) else ""
    return f"{error.get('type')}: {error.get('text')}{where}"


def _short(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
