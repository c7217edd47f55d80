"""The encoding of results that a provider's machine sends back: exact builtin data types as tagged
JSON, never pickle.

``None``, booleans, strings and small integers are encoded as themselves, everything else as ``[tag,
...]``. A value of a subclass is encoded as the plain value that it contains; a named tuple keeps
its names. Each process decides for itself what happens to an object of any other type.
"""

from __future__ import annotations

import base64
import keyword
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import Any

MAX_DEPTH = 150
MAX_ITEMS_OF_ITERATOR = 100_000
_SMALL = 1 << 53
_VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray, object, type, range, slice),
        *(list, tuple, set, frozenset, dict, deque, Counter, OrderedDict, defaultdict),
        *(Decimal, Fraction, date, datetime, time, timedelta),
    )
}
"""Types that are encoded by their name."""
DATA_ATTRIBUTES = frozenset(
    name
    for kind in (str, bytes, int, float, complex, list, tuple, dict, set, range, deque)
    for name in dir(kind)
)
"""Attribute names of data: a test that uses one of them on a result expects data."""
Other = Callable[[Any], Any]
"""How to treat an object of no builtin data type: ``encode`` calls it with the object and gets its
JSON-ready form, ``decode`` calls it with the list after the tag ``object`` and gets the object."""
Encoder = Callable[[Any, Other, int], Any]
Decoder = Callable[[list[Any], Other, int], Any]
"""The arguments are the value, or the items after the tag; ``Other``; and the depth."""


def is_named_tuple(kind: type) -> bool:
    """Whether a type is a tuple with named items and defines nothing else."""
    return kind.__mro__ == (kind, tuple, object) and type(kind.__dict__.get("_fields")) is tuple


class CodecError(ValueError):
    """A value cannot be encoded, or encoded data is malformed."""


def refuse_all_but_iterators(value: Any) -> Any:
    """An ``Other`` that accepts iterators, as lists of their items, and refuses everything else."""
    if isinstance(value, Iterator):
        items = list(islice(value, MAX_ITEMS_OF_ITERATOR + 1))
        if len(items) <= MAX_ITEMS_OF_ITERATOR:
            return ["iter", [encode(item) for item in items]]
    raise CodecError(f"a value of type {type(value).__name__} cannot be passed to the program")


def encode(value: Any, other: Other = refuse_all_but_iterators, depth: int = 0) -> Any:
    """The JSON-ready form of ``value``. Raises ``CodecError`` and what ``other`` raises."""
    if value is None or value is True or value is False:
        return value
    if depth > MAX_DEPTH:
        raise CodecError(f"nested deeper than {MAX_DEPTH}")
    for kind in type(value).__mro__:
        encoder = _ENCODERS.get(kind)
        if encoder is not None:
            return encoder(value, other, depth + 1)
    if type(value) in _VIEWS:
        return [_VIEWS[type(value)], [encode(item, other, depth + 1) for item in value]]
    return other(value)


def decode(data: Any, other: Other = refuse_all_but_iterators, depth: int = 0) -> Any:
    """The value of encoded ``data``. Raises ``CodecError`` for malformed data."""
    if data is None or type(data) in (bool, int, str):
        return data
    if depth > MAX_DEPTH + 1 or type(data) is not list or not data or type(data[0]) is not str:
        raise CodecError("malformed value")
    decoder = _DECODERS.get(data[0])
    if decoder is None:
        raise CodecError(f"unknown tag {data[0][:20]!r}")
    try:
        return decoder(data[1:], other, depth + 1)
    except (TypeError, ValueError, LookupError, OverflowError, ArithmeticError) as error:
        raise CodecError(f"malformed {data[0]}: {error}") from error


def _integer(value: int, _other: Other, _depth: int) -> Any:
    exact = int.__index__(value)
    return exact if -_SMALL < exact < _SMALL else ["int", hex(exact)]


def _items(tag: str, walk: Callable[[Any], Any]) -> Encoder:
    return lambda value, o, d: [tag, [encode(item, o, d) for item in walk(value)]]


def _set(tag: str, walk: Callable[[Any], Any]) -> Encoder:
    return lambda value, o, d: [tag, sorted((encode(item, o, d) for item in walk(value)), key=repr)]


def _pairs(tag: str) -> Encoder:
    return lambda value, o, d: [
        tag,
        [[encode(k, o, d), encode(v, o, d)] for k, v in dict.items(value)],
    ]


def _tuple(value: Any, other: Other, depth: int) -> Any:
    items = [encode(item, other, depth) for item in tuple.__iter__(value)]
    kind = type(value)
    if not is_named_tuple(kind):
        return ["tuple", items]
    return ["named", kind.__name__, list(kind.__dict__["_fields"]), items]


def _type(value: type, other: Other, _depth: int) -> Any:
    name = value.__name__
    return ["type", name] if _TYPES.get(name) is value else other(value)


def _default_dict(value: Any, other: Other, depth: int) -> Any:
    factory = value.default_factory
    known = isinstance(factory, type) and _TYPES.get(factory.__name__) is factory
    return [
        "defaultdict",
        factory.__name__ if known else None,
        *_pairs("")(value, other, depth)[1:],
    ]


_ENCODERS: dict[type, Encoder] = {
    int: _integer,
    float: lambda value, _o, _d: ["float", float.hex(value)],
    str: lambda value, _o, _d: str.__str__(value)[:],
    complex: lambda value, _o, _d: ["complex", float.hex(value.real), float.hex(value.imag)],
    bytes: lambda value, _o, _d: ["bytes", base64.b64encode(bytes(value)).decode()],
    bytearray: lambda value, _o, _d: ["bytearray", base64.b64encode(bytes(value)).decode()],
    list: _items("list", list.__iter__),
    tuple: _tuple,
    deque: _items("deque", deque.__iter__),
    set: _set("set", set.__iter__),
    frozenset: _set("frozenset", frozenset.__iter__),
    Counter: _pairs("counter"),
    OrderedDict: _pairs("ordered"),
    defaultdict: _default_dict,
    dict: _pairs("dict"),
    type: _type,
    slice: lambda value, o, d: [
        "slice",
        *(encode(part, o, d) for part in (value.start, value.stop, value.step)),
    ],
    range: lambda value, _o, _d: ["range", [value.start, value.stop, value.step]],
    Fraction: lambda value, o, d: [
        "fraction",
        encode(value.numerator, o, d),
        encode(value.denominator, o, d),
    ],
    Decimal: lambda value, _o, _d: ["decimal", Decimal.__str__(value)],
    datetime: lambda value, _o, _d: ["datetime", datetime.isoformat(value)],
    date: lambda value, _o, _d: ["date", date.isoformat(value)],
    time: lambda value, _o, _d: ["time", time.isoformat(value)],
    timedelta: lambda value, _o, _d: ["timedelta", [value.days, value.seconds, value.microseconds]],
}


def _many(build: Callable[[list[Any]], Any]) -> Decoder:
    return lambda rest, o, d: build([decode(item, o, d) for item in rest[0]])


# Sets and dicts grow item by item, because a timer can end a loop but not a constructor, and a
# program may send many keys with the same hash.


def _many_keys(build: Callable[[Any], Any]) -> Decoder:
    def decoder(rest: list[Any], other: Other, depth: int) -> Any:
        keys: set[Any] = set()
        for item in rest[0]:
            keys.add(decode(item, other, depth))
        return build(keys)

    return decoder


def _mapping(kind: Callable[[], Any]) -> Decoder:
    def decoder(rest: list[Any], other: Other, depth: int) -> Any:
        mapping = kind()
        for key, value in rest[0]:
            mapping[decode(key, other, depth)] = decode(value, other, depth)
        return mapping

    return decoder


def _keys(rest: list[Any], other: Other, depth: int) -> Any:
    return _mapping(dict)([[[item, None] for item in rest[0]]], other, depth).keys()


def _defaults(rest: list[Any], other: Other, depth: int) -> Any:
    factory = None if rest[0] is None else _TYPES[rest[0]]
    return _mapping(lambda: defaultdict(factory))(rest[1:], other, depth)


@lru_cache(64)
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name if name.isidentifier() and not keyword.iskeyword(name) else "T", fields)


def _named(rest: list[Any], other: Other, depth: int) -> Any:
    name, fields, items = rest
    values = [decode(item, other, depth) for item in items]
    # Such a field would act as a method of data that the program defines.
    if any(f in DATA_ATTRIBUTES and callable(v) for f, v in zip(fields, values, strict=True)):
        raise ValueError("a field that is a function has the name of a method")
    return _named_tuple(name, tuple(fields))._make(values)


def _pairs_of_tuples(rest: list[Any], other: Other, depth: int) -> Any:
    return _mapping(dict)([[pair[1] for pair in rest[0]]], other, depth).items()


_DECODERS: dict[str, Decoder] = {
    "int": lambda rest, _o, _d: int(rest[0], 16),
    "float": lambda rest, _o, _d: float.fromhex(rest[0]),
    "complex": lambda rest, _o, _d: complex(float.fromhex(rest[0]), float.fromhex(rest[1])),
    "bytes": lambda rest, _o, _d: base64.b64decode(rest[0], validate=True),
    "bytearray": lambda rest, _o, _d: bytearray(base64.b64decode(rest[0], validate=True)),
    "list": _many(list),
    "tuple": _many(tuple),
    "named": _named,
    "type": lambda rest, _o, _d: _TYPES[rest[0]],
    "slice": lambda rest, o, d: slice(*(decode(part, o, d) for part in rest)),
    "defaultdict": _defaults,
    "deque": _many(deque),
    "set": _many_keys(lambda keys: keys),
    "frozenset": _many_keys(frozenset),
    "iter": _many(iter),
    "keys": _keys,
    "values": _many(lambda items: dict(enumerate(items)).values()),
    "items": _pairs_of_tuples,
    "counter": _mapping(Counter),
    "ordered": _mapping(OrderedDict),
    "dict": _mapping(dict),
    "range": lambda rest, _o, _d: range(*rest[0]),
    "fraction": lambda rest, o, d: Fraction(decode(rest[0], o, d), decode(rest[1], o, d)),
    "decimal": lambda rest, _o, _d: Decimal(rest[0]),
    "datetime": lambda rest, _o, _d: datetime.fromisoformat(rest[0]),
    "date": lambda rest, _o, _d: date.fromisoformat(rest[0]),
    "time": lambda rest, _o, _d: time.fromisoformat(rest[0]),
    "timedelta": lambda rest, _o, _d: timedelta(*rest[0]),
    "object": lambda rest, other, _d: other(rest),
}
