"""Options of functions that a user registers: declared as parameters, set in the configuration."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from ctrl_megatron.config.coerce import KeyPlace, coerce_value
from ctrl_megatron.errors import UserError, describe_location, did_you_mean, raise_all

_LOOSE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def explicit_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind not in _LOOSE}


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Whether ``function`` has a ``**`` parameter."""
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


def accepted_options(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``offered`` for which ``function`` has a parameter; all if it has ``**``."""
    if takes_any_keyword(function):
        return dict(offered)
    parameters = explicit_parameters(function)
    return {name: value for name, value in offered.items() if name in parameters}


def function_options(
    function: Callable[..., Any],
    values: Mapping[str, Any],
    key: str,
    *,
    inputs: Collection[str],
    place: KeyPlace | None = None,
) -> dict[str, Any]:
    """Keyword arguments of ``function`` from ``values``, the mapping at the configuration key.

    A parameter that is not one of ``inputs``, which the caller passes itself, is an option of the
    function. A value is converted to the parameter's annotated type by the rules of the
    configuration; without an annotation, or with one that the configuration has no type for, it is
    passed unchanged. A function with ``**`` accepts options of any name.

    Raises UserError with a line for every option that the function does not have, every value of a
    wrong type, and every option that has neither a default nor a value. ``place``, where the key
    was written, begins the messages about values.
    """
    options = {name: p for name, p in explicit_parameters(function).items() if name not in inputs}
    any_name, who = takes_any_keyword(function), describe_location(function)
    before = "" if place is None else f"{place}: "
    problems, found = [], dict[str, Any]()
    for name, value in values.items():
        if name not in options and (name in inputs or not any_name):
            known = f"its options: {', '.join(options)}" if options else "it has none"
            hint = did_you_mean(name, options) or ";"
            problems.append(
                UserError(f"{before}{key}.{name}: {who} has no option {name!r}{hint} ({known})")
            )
            continue
        try:
            found[name] = _converted(function, options.get(name), value)
        except UserError as error:
            problems.append(UserError(f"{before}{key}.{name} {error}"))
    for name, parameter in options.items():
        if parameter.default is parameter.empty and name not in values:
            problems.append(UserError(f"{key}.{name} is not set; {who} requires it"))
    raise_all(problems)
    return found


def _converted(
    function: Callable[..., Any], parameter: inspect.Parameter | None, value: Any
) -> Any:
    hint = inspect.Parameter.empty if parameter is None else parameter.annotation
    if isinstance(hint, str):
        try:
            hint = typing.get_type_hints(function)[parameter.name if parameter else ""]
        except NameError:  # an annotation of names that are imported for type checkers alone
            return value
    return coerce_value(hint, value) if _has_key_type(hint) else value


def _has_key_type(hint: Any) -> bool:
    """Whether a key of the configuration could have this type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in arguments if a is not type(None)]
        return len(inner) == 1 < len(arguments) and _has_key_type(inner[0])
    if origin is tuple:
        return all(a is Ellipsis or _has_key_type(a) for a in arguments)
    return hint in (bool, int, float, str) or origin in (Literal, dict)
