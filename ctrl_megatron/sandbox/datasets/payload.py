"""Reads compressed tests: base64 of zlib of JSON or of a pickle that contains only plain data."""

from __future__ import annotations

import base64
import io
import pickle
import zlib
from typing import Any

from ctrl_megatron.problems.long_integers import load_long_integer_json

_MAX_BYTES = 256 << 20
_MAX_NODES = 5_000_000
_MAX_DEPTH = 100
_SAFE = {"set": set, "frozenset": frozenset, "complex": complex}
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def read_payload(text: str, where: str) -> Any:
    """The data in ``text``: JSON, or base64 of zlib of JSON or a pickle.

    A pickle may contain None, booleans, numbers, text, bytes, lists, tuples, sets and dicts.
    Anything else, and data that unpacks to more than 256 MiB, raises ``ValueError`` and executes
    nothing.
    """
    try:
        try:
            return load_long_integer_json(text)
        except ValueError:
            raw = _decompressed(text, where)
        try:
            return load_long_integer_json(raw)
        except ValueError:
            return _unpickle(raw, where)
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deeply") from error


def _decompressed(text: str, where: str) -> bytes:
    engine = zlib.decompressobj()
    try:
        raw = engine.decompress(base64.b64decode("".join(text.split()), validate=True), _MAX_BYTES)
    except ValueError as error:
        raise ValueError(f"{where} is neither JSON nor base64: {error}") from error
    except zlib.error as error:
        raise ValueError(f"{where} is base64 but not zlib: {error}") from error
    if engine.unconsumed_tail:
        raise ValueError(f"{where} unpacks to more than {_MAX_BYTES >> 20} MiB")
    if not engine.eof:
        raise ValueError(f"{where} is cut off: its zlib stream does not end")
    return raw


# The unpickler in Python: its memo is a dict, while in the C version an index can reserve memory.
class _PlainUnpickler(pickle._Unpickler):  # type: ignore[name-defined]
    def find_class(self, module: str, name: str, /) -> Any:
        if module in ("builtins", "__builtin__") and name in _SAFE:
            return _SAFE[name]
        raise ValueError(f"it refers to {module}.{name}, which is no plain data")

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError("it refers to an object outside")


def _unpickle(raw: bytes, where: str) -> Any:
    try:
        value = _PlainUnpickler(io.BytesIO(raw)).load()
        _require_plain(value)
    except Exception as error:  # a hostile pickle may raise whatever it likes
        text = f"{type(error).__name__}: {error}"[:300]
        raise ValueError(f"{where} is neither JSON nor a pickle of plain data: {text}") from error
    return value


def _require_plain(value: Any) -> None:
    """Require that every part is of an exact builtin type and that walking the value ends: shared
    and cyclic parts count as often as they are reached.
    """
    left, level = _MAX_NODES, [value]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for part in level:
            kind = type(part)
            if kind is dict:
                inner: list[Any] = [*part.keys(), *part.values()]
            elif kind in (list, tuple, set, frozenset):
                inner = list(part)
            elif kind in _PLAIN:
                continue
            else:
                raise ValueError(f"it contains a {kind.__name__}")
            left -= len(inner)
            if left < 0:
                raise ValueError(f"it contains more than {_MAX_NODES} parts")
            below += inner
        if not below:
            return
        level = below
    raise ValueError(f"it is nested deeper than {_MAX_DEPTH}")
