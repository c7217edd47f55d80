"""Instances of classes that both processes know (above all nodes of lists and trees), and
containers that a call may change: how they travel between the processes.

An instance travels as the name of its class and the values of its attributes. All instances of a
message are rows of one table, so that a long linked list is no deeply nested value and a cycle is
finite. Elsewhere in the message ``["instance", number]`` refers to a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ctrl_megatron.sandbox.jail.codec import CodecError

_MOST_INSTANCES = 1_000_000
_ABSENT = object()


def fields(instance: Any) -> dict[str, Any]:
    """The attributes of ``instance`` by name: its slots and its ``__dict__``."""
    found: dict[str, Any] = {}
    for kind in type(instance).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            value = getattr(instance, name, _ABSENT)
            if value is not _ABSENT and name not in ("__dict__", "__weakref__"):
                found[name] = value
    return found | getattr(instance, "__dict__", {})


def changeable(values: Iterable[Any]) -> list[Any]:
    """Containers in ``values`` that a call may change, in an order that both processes compute
    alike. Containers inside instances are left out: they travel with their instance.
    """
    found: list[Any] = []
    waiting = list(values)[::-1]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind in (list, set, deque, bytearray) or isinstance(value, dict):
            found.append(value)
        if kind in (list, tuple, deque):
            waiting.extend(reversed(value))
        elif isinstance(value, dict):
            waiting.extend(reversed(value.values()))
    return found


def contents(container: Any) -> list[Any]:
    """The items of a container, for a comparison by identity."""
    if isinstance(container, dict):
        return [part for item in container.items() for part in item]
    return list(container)


def same_things(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether both contain the same objects in the same order."""
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))


def refill(container: Any, value: Any) -> None:
    """Replace the items of ``container`` by those of ``value``. Raises ``CodecError`` if the types
    differ.
    """
    both_dicts = isinstance(container, dict) and isinstance(value, dict)
    if type(value) is not type(container) and not both_dicts:
        raise CodecError("a change of an argument into something else")
    if isinstance(container, (list, bytearray)):
        container[:] = value
    elif isinstance(container, deque):
        container.clear()
        container.extend(value)
    else:
        container.clear()
        container.update(value)


class InstanceWriter:
    """Assigns numbers to the instances of a message. ``given`` are the instances of the message
    that this one answers; they keep their numbers.
    """

    def __init__(self, given: Sequence[Any] = ()) -> None:
        self.instances = list(given)
        self._numbers = {id(instance): n for n, instance in enumerate(given)}

    def number(self, instance: Any) -> int:
        """The row number of ``instance``; a new instance gets a new row."""
        if id(instance) not in self._numbers:
            if len(self.instances) >= _MOST_INSTANCES:
                raise CodecError(f"more than {_MOST_INSTANCES} objects")
            self._numbers[id(instance)] = len(self.instances)
            self.instances.append(instance)
        return self._numbers[id(instance)]

    def table(self, encode: Callable[[Any], Any], unchanged: int = 0) -> list[Any]:
        """One row per instance: class name and encoded attributes, or None for the first
        ``unchanged`` instances. ``encode`` may add further instances.
        """
        rows: list[Any] = [None] * unchanged
        while len(rows) < len(self.instances):
            instance = self.instances[len(rows)]
            held = {name: encode(value) for name, value in fields(instance).items()}
            rows.append([type(instance).__name__, held])
        return rows


def read_instances(
    table: Any,
    *,
    class_of: Callable[[str], type],
    decode: Callable[[Any, list[Any]], Any],
    own: Sequence[Any] = (),
    refresh: bool = False,
) -> list[Any]:
    """Build the instances of a message's table. ``own`` are the instances that this process sent in
    the message before: a row that is None means the unchanged instance, and with ``refresh``
    any other row updates it.

    Raises ``CodecError`` for a malformed table.
    """
    if not isinstance(table, list) or len(table) > _MOST_INSTANCES:
        raise CodecError("malformed table of objects")
    made = list(_shells(table, class_of, own, refresh))
    for instance, row in zip(made, table, strict=True):
        if row is None:
            continue
        held = {name: decode(data, made) for name, data in row[1].items()}
        for name in fields(instance).keys() - held.keys():
            object.__delattr__(instance, name)
        for name, value in held.items():
            set_state(instance, name, value)
    return made


def set_state(instance: Any, name: str, value: Any) -> None:
    """Set an attribute. A method or property cannot be replaced, because it belongs to the record's
    class and its result may be the verdict: raises ``CodecError``.
    """
    if not name.isidentifier() or not _is_state(type(instance), name):
        raise CodecError(f"an object that replaces {name[:80]!r}")
    setter = (
        BaseException.__setattr__ if isinstance(instance, BaseException) else object.__setattr__
    )
    setter(instance, name, value)


def _shells(
    table: list[Any], class_of: Callable[[str], type], own: Sequence[Any], refresh: bool
) -> Iterator[Any]:
    for number, row in enumerate(table):
        if number < len(own) and (row is None or refresh):
            yield own[number]
        elif isinstance(row, list) and [type(part) for part in row] == [str, dict]:
            yield object.__new__(class_of(row[0]))
        else:
            raise CodecError("malformed row of an object")


def _is_state(kind: type, name: str) -> bool:
    for base in kind.__mro__:
        if name in base.__dict__:
            found = base.__dict__[name]
            slot = type(found).__name__ == "member_descriptor"
            return slot or not (callable(found) or hasattr(type(found), "__get__"))
    return not name.startswith("__")
