"""Calls of a program's functions across processes. The candidate serves them: it knows inputs,
never what is expected of them. The judge's end sends them, and takes back data of exact builtin
types only.
"""

from __future__ import annotations

import builtins
import os
import reprlib
import socket
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

from ctrl_megatron.sandbox.jail import codec, frames, program

NEW_CANDIDATE = b"N"
_ANSWER_BYTES = 4 << 20
_CALL_BYTES = 256 << 20
_FRAME_SLACK = 4096
_PIPELINED_BYTES = 1 << 16
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


class RemoteCall(NamedTuple):
    """A call of a function of the program."""

    name: str
    arguments: tuple[Any, ...]
    named: dict[str, Any]


class CandidateLost(BaseException):
    """The candidate cannot answer any more. Not an ``Exception``: a test must not catch it."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class CandidateException(Exception):
    """The function raised something that has no builtin exception's name."""


def serve_calls(fd: int, prelude: str, code: str) -> None:
    """Load ``code`` after ``prelude`` (the setup's imports) and answer calls; never returns."""
    program.fresh_streams()
    program.forget_harness()
    # Not __main__: a program's main guard reads stdin and prints, it is not what is judged.
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    failure = None
    try:
        if prelude:
            exec(compile(prelude, "setup.py", "exec", dont_inherit=True), module.__dict__)
        exec(compile(code, "solution.py", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        failure = _failure(error)
    frames.send(fd, {"loaded": failure is None, "error": failure})
    calls = frames.FrameReader(fd, limit=_CALL_BYTES)
    while failure is None:
        call = calls.receive()
        frames.send_encoded(fd, _answer(module, call))
    os._exit(0)


def _answer(module: types.ModuleType, call: dict[str, Any]) -> bytes:
    """The frame that answers ``call``."""
    try:
        arguments = [codec.decode(item) for item in call["args"]]
        named = {name: codec.decode(item) for name, item in call["named"].items()}
        if call["name"] not in module.__dict__:
            raise NameError(f"name {call['name']!r} is not defined")
        value = codec.encode(module.__dict__[call["name"]](*arguments, **named))
        changed = [
            [index, after]
            for index, (argument, before) in enumerate(zip(arguments, call["args"], strict=True))
            if isinstance(argument, (list, dict, set))
            and (after := codec.encode(argument)) != before
        ]
        answer = frames.encode({"id": call["id"], "value": value, "changed": changed})
        if len(answer) > _ANSWER_BYTES:
            raise OverflowError(f"the returned value takes more than {_ANSWER_BYTES} bytes")
    except BaseException as error:
        return frames.encode({"id": call["id"], "error": _failure(error)})
    return answer


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
        text = str(error)[:500]
    except BaseException:
        text = ""
    return {"type": type(error).__name__[:80], "text": text, "line": line}


class CandidateConnection:
    """The judge's line to the candidate of the moment. ``lost`` holds what ended it."""

    def __init__(self, requests: socket.socket, seconds: float) -> None:
        self._seconds = seconds
        requests.sendall(NEW_CANDIDATE)
        _, (self._fd,), _, _ = socket.recv_fds(requests, 64, 1)
        self._answers = frames.FrameReader(self._fd, limit=_ANSWER_BYTES + _FRAME_SLACK)
        self._call: dict[str, Any] | None = None
        self._answer: dict[str, Any] | None = None
        self._pipelined: deque[dict[str, Any]] = deque()
        self.lost: CandidateLost | None = None
        self.deadline = 0.0
        self.busy = False
        """A call is on the wire: whatever interrupts it now leaves the connection unusable."""

    def begin_test(self, deadline: float) -> None:
        """A test begins; it ends by ``deadline`` (``time.monotonic`` seconds)."""
        self.deadline, self._call, self._answer = deadline, None, None

    @property
    def pipelined(self) -> int:
        """Calls of tests to come that are on the wire."""
        return len(self._pipelined)

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
        if self.lost is not None:
            raise self.lost
        request = None if self._pipelined else _request(RemoteCall(name, arguments, named))
        self.busy = True
        if request is None:
            request = self._pipelined.popleft()
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
        try:
            value = codec.decode(answer.get("value"))
            _apply_changes(arguments, answer.get("changed", []))
        except (codec.CodecError, TypeError, ValueError, IndexError, RecursionError) as error:
            self._lose("protocol", f"the program sent a malformed answer: {error}")
        except MemoryError:
            self._lose("protocol", "the returned value takes too much memory")
        return value

    def pipeline(self, calls: Iterable[RemoteCall]) -> None:
        """Send the calls that the next tests will make, in their order; as many as fit."""
        requests, data = [], b""
        for call in calls:
            try:
                request = _request(call)
            except codec.CodecError:
                break  # the test itself will say so
            frame = frames.encode(request)
            if len(data) + len(frame) > _PIPELINED_BYTES:
                break
            requests.append(request)
            data += frame
        if len(requests) > 1:
            self.busy = True
            self._send(data)
            self.busy = False
            self._pipelined.extend(requests)

    def close(self) -> None:
        """Let go of the candidate."""
        os.close(self._fd)

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
        except frames.FrameError as error:
            self._lose("protocol", f"the program broke the protocol: {error}")
        if not isinstance(message, dict):
            self._lose("protocol", "the program broke the protocol")
        return message

    def _lose(self, status: str, reason: str) -> NoReturn:
        self.lost = CandidateLost(status, reason)
        raise self.lost


def _apply_changes(arguments: tuple[Any, ...], changes: list[Any]) -> None:
    for index, data in changes:
        target, value = arguments[index], codec.decode(data)
        if type(target) is list and type(value) is list:
            target[:] = value
        elif isinstance(target, (dict, set)) and isinstance(value, type(target)):
            target.clear()
            target.update(value)
        else:
            raise codec.CodecError("a change of an argument that cannot change")


def _request(call: RemoteCall) -> dict[str, Any]:
    return {
        "id": os.urandom(4).hex(),
        "name": call.name,
        "args": [codec.encode(value, strict=True) for value in call.arguments],
        "named": {key: codec.encode(value, strict=True) for key, value in call.named.items()},
    }


def _exception(error: Any) -> Exception:
    name, text = (error.get("type"), error.get("text")) if isinstance(error, dict) else (None, None)
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
