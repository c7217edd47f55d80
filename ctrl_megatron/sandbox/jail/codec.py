"""Values that may cross between judge and candidate: exact builtin data types as tagged JSON, never
pickle.

``None``, booleans, strings and small integers stand for themselves; everything else is ``[tag,
...]``. A value of a subclass crosses as the plain value it holds. An object of any other type
arrives as ``Opaque``: its type's name and truth value, which no comparison accepts.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

MAX_DEPTH = 150
MAX_ITEMS_OF_ITERATOR = 100_000
_SMALL = 1 << 53
_VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
Encoder = Callable[[Any, bool, int], Any]
"""Of a value, strict or not, at a depth."""


class CodecError(ValueError):
    """A value cannot cross, or what arrived is not a value."""


class Opaque:
    """Stands in the judge for an object that cannot cross."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, kind: str, truth: bool) -> None:
        self._kind = kind
        self._truth = truth

    def __bool__(self) -> bool:
        return self._truth

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"a value of type {self._kind} cannot be compared outside the program")

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self._kind} object>"


def encode(value: Any, *, strict: bool = False, depth: int = 0) -> Any:
    """JSON-ready form. With ``strict`` an object that cannot cross raises ``CodecError``."""
    if value is None or value is True or value is False:
        return value
    if depth > MAX_DEPTH:
        raise CodecError(f"nested deeper than {MAX_DEPTH}")
    for kind in type(value).__mro__:
        encoder = _ENCODERS.get(kind)
        if encoder is not None:
            return encoder(value, strict, depth + 1)
    if isinstance(value, Iterator) or type(value) in _VIEWS:
        return _iterator(value, strict, depth + 1)
    if strict:
        raise CodecError(f"a value of type {type(value).__name__} cannot be given to the program")
    return ["opaque", type(value).__name__[:80], bool(value)]


def decode(data: Any, depth: int = 0) -> Any:
    """The value that ``data`` stands for. Raises ``CodecError`` for anything malformed."""
    if data is None or type(data) in (bool, int, str):
        return data
    if depth > MAX_DEPTH + 1 or type(data) is not list or not data or type(data[0]) is not str:
        raise CodecError("malformed value")
    decoder = _DECODERS.get(data[0])
    if decoder is None:
        raise CodecError(f"unknown tag {data[0][:20]!r}")
    try:
        return decoder(data[1:], depth + 1)
    except (TypeError, ValueError, IndexError, OverflowError, ArithmeticError) as error:
        raise CodecError(f"malformed {data[0]}: {error}") from error


def _integer(value: int, _strict: bool, _depth: int) -> Any:
    exact = int.__index__(value)
    return exact if -_SMALL < exact < _SMALL else ["int", hex(exact)]


def _items(tag: str, walk: Callable[[Any], Any]) -> Encoder:
    return lambda value, s, d: [tag, [encode(item, strict=s, depth=d) for item in walk(value)]]


def _set(tag: str, walk: Callable[[Any], Any]) -> Encoder:
    return lambda value, s, d: [
        tag,
        sorted((encode(item, strict=s, depth=d) for item in walk(value)), key=repr),
    ]


def _pairs(tag: str) -> Encoder:
    return lambda value, s, d: [
        tag,
        [
            [encode(k, strict=s, depth=d), encode(v, strict=s, depth=d)]
            for k, v in dict.items(value)
        ],
    ]


def _iterator(value: Any, strict: bool, depth: int) -> list[Any]:
    items = list(islice(value, MAX_ITEMS_OF_ITERATOR + 1))
    if len(items) > MAX_ITEMS_OF_ITERATOR:
        if strict:
            raise CodecError("an iterator of this length cannot be given to the program")
        return ["opaque", type(value).__name__, True]
    tag = _VIEWS.get(type(value), "iter")
    return [tag, [encode(item, strict=strict, depth=depth) for item in items]]


_ENCODERS: dict[type, Encoder] = {
    int: _integer,
    float: lambda value, _s, _d: ["float", float.hex(value)],
    str: lambda value, _s, _d: str.__str__(value)[:],
    complex: lambda value, _s, _d: ["complex", float.hex(value.real), float.hex(value.imag)],
    bytes: lambda value, _s, _d: ["bytes", base64.b64encode(bytes(value)).decode()],
    bytearray: lambda value, _s, _d: ["bytearray", base64.b64encode(bytes(value)).decode()],
    list: _items("list", list.__iter__),
    tuple: _items("tuple", tuple.__iter__),
    deque: _items("deque", deque.__iter__),
    set: _set("set", set.__iter__),
    frozenset: _set("frozenset", frozenset.__iter__),
    Counter: _pairs("counter"),
    OrderedDict: _pairs("ordered"),
    dict: _pairs("dict"),
    range: lambda value, _s, _d: ["range", [value.start, value.stop, value.step]],
    Fraction: lambda value, s, d: [
        "fraction",
        encode(value.numerator, strict=s, depth=d),
        encode(value.denominator, strict=s, depth=d),
    ],
    Decimal: lambda value, _s, _d: ["decimal", Decimal.__str__(value)],
    datetime: lambda value, _s, _d: ["datetime", datetime.isoformat(value)],
    date: lambda value, _s, _d: ["date", date.isoformat(value)],
    time: lambda value, _s, _d: ["time", time.isoformat(value)],
    timedelta: lambda value, _s, _d: ["timedelta", [value.days, value.seconds, value.microseconds]],
}


def _many(build: Callable[[list[Any]], Any]) -> Callable[[list[Any], int], Any]:
    return lambda rest, depth: build([decode(item, depth) for item in rest[0]])


def _mapping(build: Callable[[dict[Any, Any]], Any]) -> Callable[[list[Any], int], Any]:
    return lambda rest, depth: build({decode(k, depth): decode(v, depth) for k, v in rest[0]})


_DECODERS: dict[str, Callable[[list[Any], int], Any]] = {
    "int": lambda rest, _d: int(rest[0], 16),
    "float": lambda rest, _d: float.fromhex(rest[0]),
    "complex": lambda rest, _d: complex(float.fromhex(rest[0]), float.fromhex(rest[1])),
    "bytes": lambda rest, _d: base64.b64decode(rest[0], validate=True),
    "bytearray": lambda rest, _d: bytearray(base64.b64decode(rest[0], validate=True)),
    "list": _many(list),
    "tuple": _many(tuple),
    "deque": _many(deque),
    "set": _many(set),
    "frozenset": _many(frozenset),
    "iter": _many(iter),
    "keys": _many(lambda items: dict.fromkeys(items).keys()),
    "values": _many(lambda items: dict(enumerate(items)).values()),
    "items": _many(lambda items: dict(items).items()),
    "counter": _mapping(Counter),
    "ordered": _mapping(OrderedDict),
    "dict": _mapping(dict),
    "range": lambda rest, _d: range(*rest[0]),
    "fraction": lambda rest, depth: Fraction(decode(rest[0], depth), decode(rest[1], depth)),
    "decimal": lambda rest, _d: Decimal(rest[0]),
    "datetime": lambda rest, _d: datetime.fromisoformat(rest[0]),
    "date": lambda rest, _d: date.fromisoformat(rest[0]),
    "time": lambda rest, _d: time.fromisoformat(rest[0]),
    "timedelta": lambda rest, _d: timedelta(*rest[0]),
    "opaque": lambda rest, _d: Opaque(str(rest[0]), rest[1] is True),
}
