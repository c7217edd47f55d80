"""The encoding of data that is copied between judge and program: tagged JSON, never pickle.

Immutable data of builtin types is copied. ``None``, booleans, strings and small integers are
encoded as themselves, everything else as ``[tag, ...]``. What a value of another type becomes is
decided by the ``other`` that encoder and decoder are given.
"""

from __future__ import annotations

import array
import base64
import functools
import gc
import inspect
import keyword
import operator
import pathlib
import typing
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from types import GenericAlias, SimpleNamespace, UnionType
from typing import Any
from uuid import UUID

MAX_DEPTH = 150
_SMALL = 1 << 53
_VIEWS = {type({}.keys()): "keys", type({}.values()): "values", type({}.items()): "items"}
MUTABLE: dict[type, str] = {
    list: "list",
    dict: "dict",
    set: "set",
    bytearray: "bytearray",
    deque: "deque",
    Counter: "Counter",
    OrderedDict: "OrderedDict",
    defaultdict: "defaultdict",
    array.array: "array",
    SimpleNamespace: "SimpleNamespace",
}
"""Containers that both sides keep a copy of, with one identity."""
KINDS = {name: kind for kind, name in MUTABLE.items()}
"""The containers by the names that messages use."""
IMMUTABLE: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, tuple, frozenset, range, slice),
    *(Decimal, Fraction, datetime, date, time, timedelta, timezone, UUID),
    *(pathlib.PurePosixPath, pathlib.PosixPath),
)
TYPES: dict[str, type] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (object, type, type(None), *MUTABLE, *IMMUTABLE)
}
"""Types that are encoded by their name."""
DATA_NAMES = frozenset(name for kind in (*MUTABLE, *IMMUTABLE) for name in dir(kind))
"""Attribute names of data."""
_PREDICATES = ("startswith", "endswith", "issubset", "issuperset", "isdisjoint")
DATA_PREDICATES = frozenset(
    name for name in DATA_NAMES if name in _PREDICATES or name.startswith("is")
)
"""Methods of data that answer with yes or no."""
Other = Callable[[Any], Any]


class DataError(ValueError):
    """A value cannot be encoded, or encoded data is malformed."""


def is_plain_named_tuple(kind: type) -> bool:
    """Whether a type is a tuple with named items and defines nothing else."""
    names = kind.__dict__.get("_fields")
    if kind.__mro__ != (kind, tuple, object) or type(names) is not tuple:
        return False
    return all(name.startswith("_") or name in names for name in vars(kind))


def encode_value(value: Any, other: Other, depth: int = 0) -> Any:
    """The JSON-ready form of ``value``. ``other`` gets every value that is no immutable data, and
    returns its form. Raises ``DataError`` and what ``other`` raises.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_SMALL < value < _SMALL else ["int", hex(value)]
    if depth > MAX_DEPTH:
        raise DataError(f"nested deeper than {MAX_DEPTH}")
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value, lambda item: encode_value(item, other, depth + 1))
    if is_plain_named_tuple(kind):
        items = [encode_value(item, other, depth + 1) for item in tuple.__iter__(value)]
        return ["named", kind.__name__, list(kind.__dict__["_fields"]), items]
    if kind is type and TYPES.get(name := f"{value.__module__}.{value.__qualname__}") is value:
        return ["type", name]
    return other(value)


def decode_value(data: Any, other: Other, depth: int = 0) -> Any:
    """The value of encoded ``data``; ``other`` gets every list with a tag of another kind. Raises
    ``DataError`` for malformed data.
    """
    if data is None or type(data) in (bool, int, str):
        return data
    if depth > MAX_DEPTH + 1 or type(data) is not list or not data or type(data[0]) is not str:
        raise DataError("malformed value")
    decoder = _DECODERS.get(data[0])
    if decoder is None:
        return other(data)
    try:
        return decoder(data[1:], lambda item: decode_value(item, other, depth + 1))
    except (TypeError, ValueError, LookupError, OverflowError, ArithmeticError) as error:
        raise DataError(f"malformed {data[0]}: {error}") from error


# --- containers that change -----------------------------------------------------------------------


def container_state(container: Any) -> Any:
    """The present state of a container, which ``is_changed`` compares with a later one."""
    kind = type(container)
    if issubclass(kind, dict):
        return [*container.keys()], [*container.values()]
    if kind is SimpleNamespace:
        return dict(vars(container))
    if kind is set:
        return frozenset(container)
    return bytes(container) if kind is bytearray else [*container]


def is_changed(container: Any, before: Any) -> bool:
    """Whether a container differs from its ``container_state``. The parts of lists, dicts, tuples
    and namespaces are compared by identity, sets, bytearrays and arrays by equality."""
    kind = type(container)
    if issubclass(kind, dict):
        keys, values = before
        return not (_same(container.keys(), keys) and _same(container.values(), values))
    if kind is SimpleNamespace:
        now = vars(container)
        return not (_same(now.keys(), [*before]) and _same(now.values(), [*before.values()]))
    if kind in (set, bytearray):
        return container != before
    if kind is array.array:
        return [*container] != before
    return not _same(container, before)


def _same(now: Iterable[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))  # type: ignore[arg-type]


def encode_contents(container: Any, item: Other) -> Any:
    """The JSON-ready kind and content of a container; ``item`` encodes a part."""
    kind = type(container)
    if issubclass(kind, dict):
        pairs = [[item(k), item(v)] for k, v in container.items()]
        if kind is defaultdict:
            return ["defaultdict", pairs, item(container.default_factory)]
        return [MUTABLE[kind], pairs]
    if kind is SimpleNamespace:
        return ["SimpleNamespace", [[k, item(v)] for k, v in vars(container).items()]]
    if kind is bytearray:
        return ["bytearray", base64.b64encode(container).decode()]
    if kind is array.array:
        code = container.typecode
        return ["array", [item(one) for one in container], code]
    if kind is deque:
        return ["deque", [item(one) for one in container], container.maxlen]
    return [MUTABLE[kind], [item(one) for one in kind.__iter__(container)]]


def empty_container(contents: Any) -> Any:
    """A new container of the kind that ``encode_contents`` named. Raises ``DataError``."""
    try:
        name, _, *more = contents
        if name == "array":
            return array.array(str(more[0]))
        if name == "deque":
            return deque(maxlen=more[0])
        return KINDS[name]()
    except (TypeError, ValueError, LookupError) as error:
        raise DataError(f"malformed container: {error}") from error


def fill_container(container: Any, contents: Any, item: Other) -> None:
    """Give a container the content that ``encode_contents`` wrote; it keeps its identity. Sets and
    dicts grow one by one, because an alarm can end a loop but not a constructor, and a program may
    send many keys with the same hash. Raises ``DataError``.
    """
    try:
        name, parts, *more = contents
        kind = type(container)
        if kind is not KINDS[name]:
            raise DataError("a container changed its kind")
        if issubclass(kind, dict):
            pairs = [(item(key), item(value)) for key, value in parts]
            container.clear()
            for key, value in pairs:
                container[key] = value
            if kind is defaultdict:
                container.default_factory = item(more[0])
        elif kind is SimpleNamespace:
            now = vars(container)
            now.clear()
            now.update({str(key): item(value) for key, value in parts})
        elif kind is bytearray:
            container[:] = base64.b64decode(parts, validate=True)
        elif kind is array.array:
            container[:] = array.array(container.typecode, [item(one) for one in parts])
        elif kind is set:
            members = [item(one) for one in parts]
            container.clear()
            for member in members:
                container.add(member)
        else:
            items = [item(one) for one in parts]
            container.clear()
            container.extend(items)
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise DataError(f"malformed container: {error}") from error


# --- immutable data -------------------------------------------------------------------------------

Encoder = Callable[[Any, Other], Any]


def _items(tag: str) -> Encoder:
    return lambda value, item: [tag, [item(one) for one in value]]


def _text(tag: str, write: Callable[[Any], Any]) -> Encoder:
    return lambda value, _item: [tag, write(value)]


def _signature(signature: inspect.Signature, item: Other) -> Any:
    def given(value: Any) -> Any:
        return [] if value is inspect.Parameter.empty else [item(value)]

    parameters = [
        [p.name, int(p.kind), given(p.default), given(p.annotation)]
        for p in signature.parameters.values()
    ]
    return ["signature", parameters, given(signature.return_annotation)]


_TYPING = tuple(
    {
        type(one)
        for one in (
            typing.Any,
            typing.Union,
            typing.Optional[int],  # noqa: UP045
            getattr(typing, "List"),  # noqa: B009
            getattr(typing, "List")[int],  # noqa: B009
            typing.Callable[[int], int],
        )
    }
    - {type}
)
"""Types of the annotations that ``typing`` makes."""


def _behind(view: Any) -> Any:
    """The dict behind a view, which only the collector knows."""
    found: Any = gc.get_referents(view)[0]
    return found if type(found) in MUTABLE else dict(dict.items(found))


def _encode_typing(value: Any, item: Other) -> Any:
    name = getattr(value, "_name", None)
    arguments = getattr(value, "__args__", None) if hasattr(value, "__origin__") else None
    if name is None and typing.get_origin(value) is typing.Union:
        name = "Union"
    if name is None:
        return ["generic", item(value.__origin__), item(arguments)]
    if name == "Optional":
        name = "Union"
    return ["typing", name, None if arguments is None else item(arguments)]


def _read_typing(rest: list[Any], item: Other) -> Any:
    name, arguments = rest
    if name not in typing.__all__:
        raise ValueError(f"no name of typing: {name[:40]}")
    found = getattr(typing, name)
    if arguments is None:
        return found
    given = item(arguments)
    if name == "Callable":
        return found[[*given[:-1]], given[-1]] if given[:1] != (...,) else found[..., given[-1]]
    return found[given]


_ENCODERS: dict[type, Encoder] = {
    float: _text("float", float.hex),
    complex: lambda value, _item: ["complex", float.hex(value.real), float.hex(value.imag)],
    bytes: _text("bytes", lambda value: base64.b64encode(value).decode()),
    tuple: _items("tuple"),
    frozenset: _items("frozenset"),
    **{
        kind: lambda value, item, tag=tag: [tag, item(_behind(value))]
        for kind, tag in _VIEWS.items()
    },
    slice: lambda value, item: ["slice", item(value.start), item(value.stop), item(value.step)],
    range: lambda value, item: ["range", item(value.start), item(value.stop), item(value.step)],
    Fraction: lambda value, item: ["fraction", item(value.numerator), item(value.denominator)],
    Decimal: _text("decimal", str),
    datetime: lambda value, item: [
        "datetime",
        value.replace(tzinfo=None).isoformat(),
        item(value.tzinfo),
        value.fold,
    ],
    date: _text("date", date.isoformat),
    time: _text("time", time.isoformat),
    timedelta: _text("timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    timezone: lambda value, item: ["timezone", item(value.utcoffset(None)), value.tzname(None)],
    UUID: _text("uuid", str),
    pathlib.PosixPath: _text("path", str),
    pathlib.PurePosixPath: _text("purepath", str),
    inspect.Signature: _signature,
    GenericAlias: lambda value, item: ["generic", item(value.__origin__), item(value.__args__)],
    UnionType: lambda value, item: ["union", item(value.__args__)],
    functools.partial: lambda value, item: [
        "partial",
        item(value.func),
        item(value.args),
        item(tuple(value.keywords.items())),
    ],
    **dict.fromkeys(_TYPING, _encode_typing),
    type(Ellipsis): lambda _value, _item: ["..."],
    type(NotImplemented): lambda _value, _item: ["NotImplemented"],
}

Decoder = Callable[[list[Any], Other], Any]


def _frozenset(rest: list[Any], item: Other) -> Any:
    keys: set[Any] = set()
    for one in rest[0]:
        keys.add(item(one))
    return frozenset(keys)


def _view(rest: list[Any], item: Other, kind: str) -> Any:
    mapping = item(rest[0])
    if type(mapping) not in MUTABLE or not isinstance(mapping, dict):
        raise ValueError("a view of no dict")
    return getattr(mapping, kind)()


@lru_cache(64)
def _named_tuple(name: str, names: tuple[str, ...]) -> Any:
    return namedtuple(name if name.isidentifier() and not keyword.iskeyword(name) else "T", names)


def _named(rest: list[Any], item: Other) -> Any:
    name, names, items = rest
    values = [item(one) for one in items]
    # Such a field would act as a method of data that the program defines.
    if any(f in DATA_NAMES and callable(v) for f, v in zip(names, values, strict=True)):
        raise ValueError("a field that is a function has the name of a method")
    return _named_tuple(name, tuple(names))._make(values)


def _read_signature(rest: list[Any], item: Other) -> Any:
    empty = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(
            name,
            [*inspect._ParameterKind][kind],
            default=item(default[0]) if default else empty,
            annotation=item(annotation[0]) if annotation else empty,
        )
        for name, kind, default, annotation in rest[0]
    ]
    returned = item(rest[1][0]) if rest[1] else empty
    return inspect.Signature(parameters, return_annotation=returned)


def _datetime(rest: list[Any], item: Other) -> datetime:
    zone = item(rest[1])
    if zone is not None and type(zone) is not timezone:
        raise ValueError("a time zone of the program's own")
    return datetime.fromisoformat(rest[0]).replace(tzinfo=zone, fold=rest[2])


_DECODERS: dict[str, Decoder] = {
    "int": lambda rest, _: int(rest[0], 16),
    "float": lambda rest, _: float.fromhex(rest[0]),
    "complex": lambda rest, _: complex(float.fromhex(rest[0]), float.fromhex(rest[1])),
    "bytes": lambda rest, _: base64.b64decode(rest[0], validate=True),
    "tuple": lambda rest, item: tuple([item(one) for one in rest[0]]),
    "named": _named,
    "frozenset": _frozenset,
    "keys": lambda rest, item: _view(rest, item, "keys"),
    "values": lambda rest, item: _view(rest, item, "values"),
    "items": lambda rest, item: _view(rest, item, "items"),
    "type": lambda rest, _: TYPES[rest[0]],
    "slice": lambda rest, item: slice(*map(item, rest)),
    "range": lambda rest, item: range(*map(item, rest)),
    "fraction": lambda rest, item: Fraction(item(rest[0]), item(rest[1])),
    "decimal": lambda rest, _: Decimal(rest[0]),
    "datetime": _datetime,
    "date": lambda rest, _: date.fromisoformat(rest[0]),
    "time": lambda rest, _: time.fromisoformat(rest[0]),
    "timedelta": lambda rest, _: timedelta(*rest[0]),
    "timezone": lambda rest, item: timezone(item(rest[0]), str(rest[1])),
    "uuid": lambda rest, _: UUID(str(rest[0])),
    "path": lambda rest, _: pathlib.PosixPath(rest[0]),
    "purepath": lambda rest, _: pathlib.PurePosixPath(rest[0]),
    "signature": _read_signature,
    "generic": lambda rest, item: GenericAlias(item(rest[0]), item(rest[1])),
    "union": lambda rest, item: functools.reduce(operator.or_, item(rest[0])),
    "typing": _read_typing,
    "partial": lambda rest, item: functools.partial(
        item(rest[0]), *item(rest[1]), **dict(item(rest[2]))
    ),
    "...": lambda _rest, _: ...,
    "NotImplemented": lambda _rest, _: NotImplemented,
}
