"""Reads single keys of a Hugging Face ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ctrl_megatron.errors import UserError


def positive_number(config: Mapping[str, Any], key: str, where: str) -> Any:
    """The number under ``key``; UserError unless it is there, finite and greater than 0."""
    value = config.get(key)
    if value is None:
        raise UserError(f"{where}: the key {key!r} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UserError(f"{where}: {key}={value!r} must be a number greater than 0")
    return value


def positive_int(config: Mapping[str, Any], key: str, where: str) -> int:
    """The integer under ``key``; UserError unless it is there and greater than 0."""
    value = positive_number(config, key, where)
    if not isinstance(value, int):
        raise UserError(f"{where}: {key}={value!r} must be a whole number")
    return value


def require_multiple(whole: int, name: str, part: int, part_name: str, where: str) -> None:
    """UserError unless ``whole`` is a multiple of ``part``."""
    if whole % part:
        raise UserError(f"{where}: {name}={whole} is not a multiple of {part_name}={part}")


def require_even_rotary_width(width: int, where: str) -> None:
    """UserError unless ``width``, the rotated numbers of a head, is even; ``where`` begins the
    message."""
    if width % 2:
        raise UserError(f"{where}: heads of {width} numbers cannot be rotated in pairs")
