"""Serves calls of the functions that a program defines. It knows inputs, never what is expected of
them.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

from ctrl_megatron.sandbox.jail import codec, frames, program

ANSWER_BYTES = 4 << 20
_CALL_BYTES = 256 << 20


def run(fd: int, prelude: str, code: str) -> None:
    """Load ``code`` (after ``prelude``, the imports of the tests' setup) and answer calls; never
    returns.
    """
    program.fresh_streams()
    program.forget_harness()
    # Not __main__: a program's main guard reads stdin and prints, it is not what is judged.
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    failure = _load(module, prelude, code)
    frames.send(fd, {"loaded": failure is None, "error": failure})
    calls = frames.Reader(fd, limit=_CALL_BYTES)
    while failure is None:
        call = calls.receive()
        frames.send_encoded(fd, _answer(module, call))
    os._exit(0)


def _load(module: types.ModuleType, prelude: str, code: str) -> dict[str, Any] | None:
    try:
        if prelude:
            exec(compile(prelude, "setup.py", "exec", dont_inherit=True), module.__dict__)
        exec(compile(code, "solution.py", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        return _failure(error)
    return None


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
        if len(answer) > ANSWER_BYTES:
            raise OverflowError(f"the returned value takes more than {ANSWER_BYTES} bytes")
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
