"""Exceptions on both sides of a call: how the candidate encodes an exception of the program, how
the judge rebuilds it, and the failures of the call itself.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from ctrl_megatron.sandbox.jail import codec, frames
from ctrl_megatron.sandbox.jail.instances import set_state

_MOST_BASES = 16
_ARGUMENTS_BYTES = 1 << 17
ENDINGS = {kind.__name__: kind for kind in (StopIteration, StopAsyncIteration, GeneratorExit)}
"""Exceptions that would silently end a loop of the test. They are raised only in a test whose text
names them."""
# A group holds exceptions, which are no data.
_NEVER_RAISED = (*ENDINGS.values(), BaseExceptionGroup)
_EXCEPTIONS: dict[str, type[BaseException]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, BaseException)
    and kind not in (BaseException, Exception)
    and not issubclass(kind, _NEVER_RAISED)
}


class HarnessFailure(BaseException):
    """A call could not be made, or its answer could not be used: the test has failed, even if it
    catches this. It derives from ``BaseException``, so that a test that expects an exception of the
    function does not take this for one.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class CandidateLost(HarnessFailure):
    """The candidate cannot answer any more."""


def is_of_program(error: BaseException) -> bool:
    """Whether a call of the program raised ``error``."""
    return getattr(error, "_of_program", False)


class CandidateException(Exception):
    """The program raised an exception whose only builtin bases are ``Exception`` and
    ``BaseException``.
    """


def decode_exception(error: Any, class_of_tests: Callable[[str], type | None]) -> BaseException:
    """The exception for what ``encode_exception`` returned, as one of the tests' own classes or as
    the first builtin class that it derives from.
    """
    name, text = (error.get("type"), error.get("text")) if isinstance(error, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(text, str):
        return CandidateException("unknown error")
    bases = error.get("bases")
    kinds = [name, *(bases if isinstance(bases, list) else ())]
    found = (_kind_named(kind, class_of_tests) for kind in kinds if isinstance(kind, str))
    kind = next(filter(None, found), CandidateException)
    return _raised(kind, text, error.get("args"), error.get("state"))


def _kind_named(
    name: str, class_of_tests: Callable[[str], type | None]
) -> type[BaseException] | None:
    own = class_of_tests(name)
    return own if own is not None and issubclass(own, BaseException) else _EXCEPTIONS.get(name)


def _raised(kind: type[BaseException], text: str, arguments: Any, state: Any) -> BaseException:
    try:
        decoded = (
            [codec.decode(item) for item in arguments] if isinstance(arguments, list) else [text]
        )
        # The constructor of a test's class may require other arguments.
        error = kind(*decoded) if kind.__module__ == "builtins" else kind.__new__(kind)
        error.args = tuple(decoded)
        for name, data in (state if isinstance(state, dict) else {}).items():
            if not name.startswith("__"):
                set_state(error, name, codec.decode(data))
    except (codec.CodecError, TypeError, ValueError, RecursionError):
        return CandidateException(text)
    return error


def describe(error: Any) -> str:
    """An encoded exception, or a text, as text with type and line."""
    if isinstance(error, str):
        return error
    if not isinstance(error, dict):
        return "unknown error"
    kind, text, line = (error.get(key) for key in ("type", "text", "line"))
    # Only text is used: a nested value from the program may be too deep to print.
    if not isinstance(kind, str) or not isinstance(text, str):
        return "an error without a description"
    return f"{kind}: {text}{f' (line {line})' if isinstance(line, int) else ''}"


def builtin_exception(name: str) -> type[BaseException]:
    """The builtin exception of that name, or a new class of that name."""
    found = getattr(builtins, name, None)
    is_exception = isinstance(found, type) and issubclass(found, BaseException)
    return found if is_exception else type(name, (Exception,), {})  # type: ignore[return-value]


def encode_exception(error: BaseException) -> dict[str, Any]:
    """Names of the exception's classes, its text, the program's line, and its data."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "solution.py":
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        line = error.lineno
    try:
        # Only KeyError formats its argument with repr.
        only = error.args[0] if len(error.args) == 1 else None
        text = (only if type(only) is str else str(error))[:500]
    except BaseException:
        text = ""
    kinds = [kind.__name__[:80] for kind in type(error).__mro__[:_MOST_BASES]]
    bases = [name for name in kinds[1:] if name not in ("Exception", "BaseException", "object")]
    return {
        "type": kinds[0],
        "bases": bases,
        "text": text,
        "line": line,
        "args": _plain(lambda: [text] if _words_itself(type(error)) else list(error.args)),
        "state": _plain(lambda: dict(error.__dict__)),
    }


def _words_itself(kind: type) -> bool:
    """Whether a class of the program defines the exception's ``__str__``."""
    maker = next(base for base in kind.__mro__ if "__str__" in base.__dict__)
    return maker.__module__ != "builtins"


def _plain(held: Callable[[], list[Any] | dict[str, Any]]) -> Any:
    """The encoded arguments or attributes of an exception, None if they are not data or
    too large.
    """
    try:
        found = held()
        encoded = (
            {name: codec.encode(value) for name, value in found.items()}
            if isinstance(found, dict)
            else [codec.encode(value) for value in found]
        )
        return encoded if len(frames.encode(encoded)) <= _ARGUMENTS_BYTES else None
    except BaseException:
        return None
