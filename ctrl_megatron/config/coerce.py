"""From a plain tree (what YAML gives) to typed dataclasses: by the field's type, or an error."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


def build(cls: type[T], tree: Mapping[str, Any], places: Mapping[str, str]) -> T:
    """The dataclass ``cls`` filled from ``tree``; fields that are absent keep their default.

    ``places`` maps a dotted key to where it was written (``run.yaml line 7``).
    Raises ValueError with one line per unknown key or wrong value.
    """
    problems: list[str] = []
    result = _Builder(root=cls, places=places, problems=problems).group(cls, tree, "")
    if problems:
        raise ValueError("\n".join(problems))
    return result


def leaf_keys(cls: type, prefix: str = "") -> list[str]:
    """Dotted names of all fields that are not groups, in the order of the schema."""
    keys: list[str] = []
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            keys += leaf_keys(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def unknown_key(root: type, group: type, key: str) -> str:
    """One sentence about a key that does not exist, with the nearest one that does."""
    prefix, _, name = key.rpartition(".")
    siblings = list(typing.get_type_hints(group))
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    candidates = [f"{prefix}.{near[0]}" if prefix else near[0]] if near else []
    leaves = leaf_keys(root)
    by_name = difflib.get_close_matches(name, {k.rpartition(".")[2] for k in leaves}, n=1)
    if by_name and not near:
        candidates = [k for k in leaves if k.rpartition(".")[2] == by_name[0]][:3]
    where = f"{prefix} has the keys" if prefix else "the groups are"
    hint = f"did you mean {' or '.join(map(repr, candidates))}? " if candidates else ""
    return f"unknown key {key!r}: {hint}({where} {', '.join(siblings)})"


@dataclasses.dataclass(slots=True, kw_only=True)
class _Builder:
    """One pass over a tree; collects every problem so that the user sees all of them at once."""

    root: type
    places: Mapping[str, str]
    problems: list[str]

    def report(self, key: str, text: str) -> None:
        inside = (p for k, p in self.places.items() if k.startswith(f"{key}."))
        place = self.places.get(key) or next(inside, "")
        self.problems.append(f"{place}: {text}" if place else text)

    def group(self, cls: type[T], tree: object, prefix: str) -> T:
        tree = {} if tree is None else tree  # a group whose keys are all commented out
        if not isinstance(tree, Mapping):
            self.report(prefix, f"{prefix} is a group of keys, not the value {tree!r}")
            return cls()
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for name, value in tree.items():
            key = f"{prefix}.{name}" if prefix else str(name)
            if name not in hints:
                self.report(key, unknown_key(self.root, cls, key))
            elif dataclasses.is_dataclass(hints[name]):
                values[name] = self.group(hints[name], value, key)
            else:
                self.leaf(values, name, hints[name], value, key)
        return cls(**values)

    def leaf(self, values: dict[str, Any], name: str, hint: Any, value: Any, key: str) -> None:
        try:
            values[name] = coerce(hint, value)
        except ValueError as error:
            self.report(key, f"{key} {error}")


def coerce(hint: Any, value: Any) -> Any:
    """``value`` as the type ``hint``; ValueError (to be read after the key) where it is not one."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None else coerce(_without_none(arguments), value)
    if origin is Literal:
        return _choice(arguments, value)
    if origin is tuple:
        return _tuple(arguments, value)
    if origin is dict:
        return _mapping(value)
    return {bool: _bool, int: _int, float: _float, str: _str}[hint](value)


def _without_none(arguments: tuple[Any, ...]) -> Any:
    (hint,) = (a for a in arguments if a is not type(None))
    return hint


def _choice(allowed: tuple[str, ...], value: Any) -> str:
    if value in allowed:
        return value
    near = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"must be one of {', '.join(allowed)}, not {value!r}{hint}")


def _tuple(arguments: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    variadic = len(arguments) == 2 and arguments[1] is Ellipsis
    if variadic and isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list, not {value!r}")
    if not variadic and len(value) != len(arguments):
        raise ValueError(f"must be a list of {len(arguments)} values, not {value!r}")
    hints = [arguments[0]] * len(value) if variadic else list(arguments)
    return tuple(coerce(hint, item) for hint, item in zip(hints, value, strict=True))


def _mapping(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise ValueError(f"must be a mapping of names to values, not {value!r}")
    return dict(value)


def _bool(value: Any) -> bool:
    word = str(value).lower() if isinstance(value, bool | str) else None
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError(f"must be true or false, not {value!r}")


def _int(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    raise ValueError(f"must be an integer, not {value!r}")


def _float(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"must be a finite number, not {value!r}")
    return number


def _str(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return value
    raise ValueError(f"must be text, not {value!r}; put it in quotes if it is meant as text")
