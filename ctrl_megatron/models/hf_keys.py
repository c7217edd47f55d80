"""Reads single keys of a Hugging Face ``config.json``."""

from __future__ import annotations

import math
from typing import Any

from ctrl_megatron.errors import UserError


def need(config: dict[str, Any], key: str, where: str) -> Any:
    """The number under ``key``; UserError unless it is there, finite and greater than 0."""
    value = config.get(key)
    if value is None:
        raise UserError(f"{where}: the key {key!r} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UserError(f"{where}: {key}={value!r} must be a number greater than 0")
    return value
