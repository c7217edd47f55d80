"""Typed access to the fields of a record; every error names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctrl_megatron.problems.comparison import ComparisonRule, rule_named
from ctrl_megatron.problems.long_integers import load_long_integer_json


def text_field(value: Any, where: str) -> str:
    """``value`` if it is a text; the joined lines if it is a list of texts. Raises
    ``ValueError``.
    """
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{where} must be text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} contains half a character (a lone surrogate)") from error
    return value


def non_empty_list_field(value: Any, where: str) -> list[Any]:
    """Require a list that is not empty. Raises ``ValueError``."""
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list, got {type(value).__name__}")
    if not value:
        raise ValueError(f"{where} is empty: nothing to judge")
    return value


def object_field(value: Any, where: str) -> dict[str, Any]:
    """Require an object. Raises ``ValueError``."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {type(value).__name__}")
    return value


def positive_field(value: Any, where: str) -> float:
    """Require a finite number above 0. Raises ``ValueError``."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise ValueError(f"{where} must be a positive number, got {value!r}"[:200])
    return float(value)


def flag_field(data: Mapping[str, Any], name: str) -> bool:
    """The boolean ``data[name]``, False if it is missing. Raises ``ValueError``."""
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"provided_data.{name} must be true or false, got {value!r}"[:200])
    return bool(value)


def rule_field(data: Mapping[str, Any], default: ComparisonRule) -> ComparisonRule:
    """The rule that ``data["comparison"]`` names, ``default`` if it is missing or empty. Raises
    ``ValueError``.
    """
    name = data.get("comparison")
    try:
        return default if name is None or name == "" else rule_named(name)
    except ValueError as error:
        raise ValueError(f"provided_data.{error}") from error


def json_field(value: Any, where: str) -> Any:
    """``value``, or the value of its text as JSON. Raises ``ValueError``."""
    if not isinstance(value, str):
        return value
    try:
        return load_long_integer_json(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
