"""Converts a plain tree, such as a parsed YAML file, to typed dataclasses."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union

from ctrl_megatron.config.foreign import foreign_key_hint, unknown_key_hint
from ctrl_megatron.config.keys import field_types, keys_of_class
from ctrl_megatron.errors import UserError, did_you_mean

T = TypeVar("T")
_LARGEST, _DIGITS = 2**63 - 1, 400
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


@dataclasses.dataclass(frozen=True, slots=True)
class KeyPlace:
    """The place where a key was written."""

    text: str
    """``run.yaml line 7`` or ``override 'a.b=1'``."""
    is_override: bool = False

    def __str__(self) -> str:
        return self.text


def build_config(cls: type[T], tree: Mapping[str, Any], places: Mapping[str, KeyPlace]) -> T:
    """The dataclass ``cls`` filled from ``tree``; fields that are absent keep their default.

    ``places`` maps a dotted key to where it was written.
    Raises ValueError with one line per unknown key or wrong value, all of them at once.
    """
    problems: list[tuple[str, str]] = []
    result = _group(cls, tree, "", tuple(key.name for key in keys_of_class(cls)), problems)
    lines = []
    for name, text in problems:
        inside = (place for key, place in places.items() if key.startswith(f"{name}."))
        place = places.get(name) or next(inside, None)
        lines.append(f"{place}: {text}" if place else text)
    if lines:
        raise UserError("\n".join(lines))
    return result


def _group(
    cls: type[T], tree: object, prefix: str, keys: Sequence[str], problems: list[tuple[str, str]]
) -> T:
    tree = {} if tree is None else tree  # a group whose keys are all commented out
    if not isinstance(tree, Mapping):
        problems.append((prefix, f"{prefix} is a group of keys, not the value {tree!r}"))
        return cls()
    hints = field_types(cls)
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if name not in hints:
            foreign = [(leaf, foreign_key_hint(leaf)) for leaf in _leaves(key, value)]
            problems += [(leaf, text) for leaf, text in foreign if text]
            if not all(text for _, text in foreign):
                problems.append((key, unknown_key_hint(key, cls, keys)))
        elif dataclasses.is_dataclass(hints[name]):
            values[name] = _group(hints[name], value, key, keys, problems)
        else:
            try:
                values[name] = coerce_value(hints[name], value)
            except ValueError as error:
                problems.append((key, f"{key} {error}"))
    return cls(**values)


def _leaves(name: str, value: object) -> list[str]:
    """The dotted names of all values below ``name``."""
    if not isinstance(value, Mapping) or not value:
        return [name]
    return [leaf for key, inner in value.items() for leaf in _leaves(f"{name}.{key}", inner)]


def coerce_value(hint: Any, value: Any) -> Any:
    """``value`` as the type ``hint``; UserError, whose message continues the key, if it is not."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        inner = [a for a in arguments if a is not type(None)]
        if len(inner) > 1:  # a list or a mapping
            kind = dict if isinstance(value, Mapping) else tuple
            inner = [a for a in inner if typing.get_origin(a) is kind]
        return coerce_value(inner[0], value)
    if origin is Literal:
        return require_one_of(arguments, value)
    if origin is tuple:
        return _tuple(arguments, value)
    if origin is dict:
        value = {} if value is None else value
        if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
            raise UserError(f"must be a mapping of names to values, not {value!r}")
        return dict(value)
    return _scalar(hint, value)


def require_one_of(allowed: tuple[str, ...], value: Any) -> str:
    """``value``, of which a boolean is the word ``true`` or ``false``; UserError, whose message
    continues the key, if it is none of ``allowed``."""
    if isinstance(value, bool):
        value = str(value).lower()
    if value in allowed:
        return value
    raise UserError(
        f"must be one of {', '.join(allowed)}, not {value!r}{did_you_mean(value, allowed)}"
    )


def _tuple(arguments: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    variadic = len(arguments) == 2 and arguments[1] is Ellipsis
    if variadic and isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        raise UserError(f"must be a list, not {value!r}")
    if not variadic and len(value) != len(arguments):
        raise UserError(f"must be a list of {len(arguments)} values, not {value!r}")
    hints = [arguments[0]] * len(value) if variadic else list(arguments)
    return tuple(coerce_value(hint, item) for hint, item in zip(hints, value, strict=True))


def _scalar(hint: type, value: Any) -> bool | int | float | str:
    is_bool, is_int = isinstance(value, bool), type(value) is int
    if hint is bool:
        word = str(value).lower() if is_bool or isinstance(value, str) else None
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise UserError(f"must be true or false, not {value!r}")
    if hint is int:
        whole = isinstance(value, float) and value.is_integer()
        if not (whole or is_int or (isinstance(value, str) and _INTEGER.fullmatch(value))):
            raise UserError(f"must be an integer, not {value!r}")
        number = int(value) if len(str(value)) <= _DIGITS else _LARGEST + 1
        if not -_LARGEST <= number <= _LARGEST:
            raise UserError(f"must be an integer of 64 bits, not {value!r:.60}")
        return number
    if hint is float:
        try:
            number = math.nan if is_bool else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
        raise UserError(f"must be a finite number, not {value!r}")
    if is_int or isinstance(value, str):
        return str(value)
    raise UserError(f"must be text, not {value!r}; put it in quotes if it is meant as text")
