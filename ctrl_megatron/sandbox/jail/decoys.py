"""Variants of a test's data. A program that is asked whether its object equals each member of a
family cannot tell which member the test contains.

The family grows from the test's data as a random tree, with one small change per branch, and its
members are compared in random order, so the test's data is neither in the middle nor at the edge.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any

FAMILY = 10
"""Members of a family, including the test's data."""
_TRIES = 200
_CLASSES = (string.digits, string.ascii_lowercase, string.ascii_uppercase, string.punctuation)
_RANDOM = random.SystemRandom()


def family_of(data: Any) -> list[Any]:
    """``data`` and variants of it in random order, all different: between two and ``FAMILY``
    members.
    """
    family, seen = [data], {repr(data)}
    for _ in range(_TRIES):
        if len(family) == FAMILY:
            break
        other = _changed(_RANDOM.choice(family))
        if repr(other) not in seen:
            family.append(other)
            seen.add(repr(other))
    _RANDOM.shuffle(family)
    return family


def _changed(data: Any) -> Any:
    change = _CHANGES.get(type(data))
    return _RANDOM.choice((0, 1, "", None, ())) if change is None else change(data)


def _number(number: Any) -> Any:
    other = number + _RANDOM.choice((-3, -2, -1, 1, 2, 3))
    # Adding a small number changes neither infinities nor very large floats.
    return other if other != number and other == other else type(number)(_RANDOM.randrange(100))


def _text(text: str) -> str:
    if not text or _RANDOM.random() < 0.2:
        at = _RANDOM.randint(0, len(text))
        return text[:at] + _RANDOM.choice(text or string.ascii_lowercase) + text[at:]
    at = _RANDOM.randrange(len(text))
    if len(text) > 1 and _RANDOM.random() < 0.2:
        return text[:at] + text[at + 1 :]
    kind = next((kind for kind in _CLASSES if text[at] in kind), string.ascii_lowercase)
    return text[:at] + _RANDOM.choice(kind) + text[at + 1 :]


def _items(items: list[Any]) -> list[Any]:
    if not items:
        return [_RANDOM.choice((0, 1, None, ""))]
    at, dice = _RANDOM.randrange(len(items)), _RANDOM.random()
    if dice < 0.15:
        return items[:at] + items[at + 1 :]
    if dice < 0.3:
        return [*items[:at], _changed(_RANDOM.choice(items)), *items[at:]]
    return [*items[:at], _changed(items[at]), *items[at + 1 :]]


def _mapping(data: dict[Any, Any]) -> dict[Any, Any]:
    pairs = list(data.items())
    if not pairs or _RANDOM.random() < 0.2:
        return dict(_hashable_items(pairs) if pairs else [(_RANDOM.choice((0, "", None)), 0)])
    at = _RANDOM.randrange(len(pairs))
    return {**data, pairs[at][0]: _changed(pairs[at][1])}


def _hashable_items(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    at = _RANDOM.randrange(len(pairs))
    return [(_changed(key) if i == at else key, value) for i, (key, value) in enumerate(pairs)]


_CHANGES: dict[type, Callable[[Any], Any]] = {
    bool: lambda data: not data,
    int: _number,
    float: _number,
    complex: _number,
    str: _text,
    bytes: lambda data: _text(data.decode("latin-1")).encode("latin-1"),
    list: _items,
    tuple: lambda data: tuple(_items(list(data))),
    set: lambda data: set(_items(list(data))),
    frozenset: lambda data: frozenset(_items(list(data))),
    dict: _mapping,
}
