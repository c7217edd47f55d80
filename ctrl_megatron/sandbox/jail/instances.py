"""Objects that both sides know the class of, nodes of lists and trees above all, and values that a
call may change: how they cross from one process to the other and back.

An instance crosses as the name of its class and what its attributes hold. All instances of a
message lie side by side in its table, so a long linked list is no deep value and a cycle no endless
one. Numbers of the table stand for them elsewhere: ``["instance", number]``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ctrl_megatron.sandbox.jail.codec import CodecError

_MOST_INSTANCES = 1_000_000
_ABSENT = object()


def fields(instance: Any) -> dict[str, Any]:
    """What the attributes of ``instance`` hold: its slots and its ``__dict__``."""
    found: dict[str, Any] = {}
    for kind in type(instance).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            value = getattr(instance, name, _ABSENT)
            if value is not _ABSENT and name not in ("__dict__", "__weakref__"):
                found[name] = value
    return found | getattr(instance, "__dict__", {})


def changeable(values: Iterable[Any]) -> list[Any]:
    """Containers in ``values`` that a call may change, in an order that both sides see: those that
    lie in instances are their instance's.
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
    """What a container holds, to tell by identity whether it has changed."""
    if isinstance(container, dict):
        return [part for item in container.items() for part in item]
    return list(container)


def same_things(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether both hold the same objects in the same order."""
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))


def refill(container: Any, value: Any) -> None:
    """Make ``container`` hold what ``value`` does. Raises ``CodecError`` for another kind."""
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
    """Numbers the instances of a message. ``given`` came with the message that this one answers and
    keep their numbers.
    """

    def __init__(self, given: Sequence[Any] = ()) -> None:
        self.instances = list(given)
        self._numbers = {id(instance): n for n, instance in enumerate(given)}

    def number(self, instance: Any) -> int:
        """The number that stands for ``instance``."""
        if id(instance) not in self._numbers:
            if len(self.instances) >= _MOST_INSTANCES:
                raise CodecError(f"more than {_MOST_INSTANCES} objects")
            self._numbers[id(instance)] = len(self.instances)
            self.instances.append(instance)
        return self._numbers[id(instance)]

    def table(self, encode: Callable[[Any], Any], unchanged: int = 0) -> list[Any]:
        """For each instance its class's name and its attributes, None for the first ``unchanged``.
        ``encode`` may number further ones.
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
    """The instances of a message's table. Those of ``own``, which the message before this one gave
    away, are themselves where their row is None or, to be changed, with ``refresh``.

    Raises ``CodecError`` for what is no table.
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
    """Let ``instance`` hold ``value``. A method or property it may not replace: the class is the
    record's, and what its methods say may be the verdict. Raises ``CodecError``.
    """
    if not name.isidentifier() or not _is_state(type(instance), name):
        raise CodecError(f"an object that brings its own {name[:80]!r}")
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
